# SPDX-License-Identifier: Apache-2.0
"""vLLM engines with our connector: their configuration, the prompts that they get, the answers to expect."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testing.clockwork.chain import FIRST_ORDINARY_TOKEN, reference
from testing.clockwork.harness import Engine, Harness
from testing.node import Node

VOCAB = 2048
BLOCK = 16
CHUNK = 64
"""Most tokens of one step."""
START = 120.0
"""Seconds that an engine's start may take."""

PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE: Mapping[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}


def prompt(length: int, *seed: object) -> list[int]:
    """Ordinary tokens, the same for the same length and seed."""
    chance = random.Random(repr((length, *seed)))
    return [chance.randrange(FIRST_ORDINARY_TOKEN, VOCAB) for _ in range(length)]


def answer(tokens: Sequence[int], count: int) -> list[int]:
    """What a correct engine says."""
    return reference(tokens, count, VOCAB)


def launch(
    harness: Harness,
    name: str,
    role: str,
    node: Node,
    model: Path,
    *,
    connector: str = "kvpush_client.vllm.connector:KvpushConnector",
    policy: str = "recompute",
    extra: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Engine:
    """Starts an engine and returns at once; `Engine.ready` waits for it. Its engine_id is its name.

    `extra` goes into `kv_connector_extra_config`, `arguments` are vLLM's.
    """
    module, _, kind = connector.partition(":")
    transfer = {
        "kv_connector": kind,
        "kv_connector_module_path": module,
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "runtime_dir": str(node.runtime_dir),
            "start_timeout": START,
            **(extra or {}),
        },
    }
    defaults: dict[str, Any] = {
        "block_size": BLOCK,
        "max_num_batched_tokens": CHUNK,
        "kv_cache_bytes": 64 << 20,
    }
    return harness.engine(name, model=model, kv_transfer_config=transfer, **(defaults | arguments))


def coordinates(engine_id: str, host: str, port: int) -> dict[str, Any]:
    """What a receiver's leg says of its sender."""
    return {"remote_engine_id": engine_id, "remote_host": host, "remote_port": port}
