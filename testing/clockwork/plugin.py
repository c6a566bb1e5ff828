# SPDX-License-Identifier: Apache-2.0
"""The entry point by which `vllm serve` finds the clockwork model (see README.md)."""

from kvpush_client.vllm.cpu import allow_amx


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm import ModelRegistry

    allow_amx()
    # By name: the front end must not import a model to know of it.
    ModelRegistry.register_model("ClockworkForCausalLM", "testing.clockwork.model:ClockworkForCausalLM")
