# SPDX-License-Identifier: Apache-2.0
"""What the longest sequence that an engine takes, vLLM's max_model_len, changes about KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_POSITIONS: Mapping[str, Callable[[int, int], int]] = {"minimax_m2": max, "plamo3": min}
"""Models that size their RoPE by it: what they make of the configuration's positions and it."""
_SIZED = frozenset({"dynamic", "longrope"})
"""RoPE whose angles or magnitudes, not only its tables, depend on its size."""
_TEMPERED = 32768


def effect_of_length(model: Any) -> str:
    """What of a model's KV vLLM decides by max_model_len; "none" if all lengths give the same."""
    text, length = model.hf_text_config, _loaded_for(model)
    kind = getattr(text, "model_type", "")
    found = []
    for rope in _ropes(text):
        name = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings")
        if name == "longrope" and original:
            found.append(f"{'long' if length > original else 'short'} factors of longrope")
        if name in _SIZED and kind in _POSITIONS:
            found.append(f"{name} RoPE of {_POSITIONS[kind](text.max_position_embeddings, length)} positions")
    if kind == "llama4_text":
        said = model.try_get_generation_config() | model.override_generation_config
        tempered = said.get("attn_temperature_tuning", length > _TEMPERED)
        found.append(f"attention temperature {'on' if tempered else 'off'}")
    return ", ".join(dict.fromkeys(found)) or "none"


def _loaded_for(model: Any) -> int:
    """The length when the model was made: one that vLLM fits to the memory afterwards changes no layer."""
    if model.original_max_model_len == -1:
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


def _ropes(text: Any) -> list[Mapping[str, Any]]:
    """The RoPE parameters of a model: one set for all layers, or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
