# SPDX-License-Identifier: Apache-2.0
"""What must be equal in two engines for the KV of one to mean the same in the other.

Where a folder lies does not matter, only what is in it; a model of a hub is its commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpush_client.vllm.checkpoint import canonical, model_identity
from kvpush_client.vllm.length import effect_of_length

PROTOCOL = "1"
"""Of the connector: changes whenever two connectors of different versions would not understand each other."""

_ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_dim",
    "position_embedding_type",
    "qk_rope_head_dim",
)
_UNSCALED = frozenset({"auto", "bfloat16", "float16", "float32"})
_ALIASES = {"fp8": "fp8_e4m3"}


def fingerprint_of(
    vllm_config: Any, kv_cache_config: Any, layers: Mapping[str, Any], protocol: str = PROTOCOL
) -> dict[str, str]:
    """The fields of an engine's fingerprint.

    `layers` are the attention layers by name, as vLLM made them in this process.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    text = model.hf_text_config
    return {
        "protocol": protocol,
        "model": model_identity(model, vllm_config.load_config),
        "compute": compute(model),
        "adapter": adapter_identity(vllm_config.lora_config),
        "draft": draft_identity(vllm_config),
        "max_model_len": effect_of_length(model),
        "kv_dtype": kv_dtypes(kv_cache_config, layers),
        "kv_scales": scales_source(cache, str(vllm_config.kv_transfer_config.engine_id)),
        "attention": _summary(attention_packing(layer) for layer in layers.values()),
        "rope": canonical({key: getattr(text, key, None) for key in _ROPE_KEYS}),
        "head_size": _summary(str(getattr(layer, "head_size", "?")) for layer in layers.values()),
    }


def compute(model: Any) -> str:
    """What a model's layers compute in, and which of vLLM's implementations of them does."""
    said = f"{_dtype(model.dtype)} {model.quantization or 'unquantized'} {model.architecture}"
    # How weights are quantized while they are loaded, and classes in the place of others.
    told = [value for value in (model.quantization_config, model.model_class_overrides) if value]
    return f"{said} {canonical(told)}" if told else said


def draft_identity(vllm_config: Any) -> str:
    """The draft model whose layers lie in the KV cache too; "none" where speculation is off or needs none."""
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return "none"
    draft = speculation.draft_model_config
    load = speculation.draft_load_config or vllm_config.load_config
    return f"{speculation.method} {compute(draft)} {model_identity(draft, load)}"


def adapter_identity(lora: Any) -> str:
    """Requests with an adapter of their own aren't transferred; an adapter that all requests bear counts."""
    defaults = getattr(lora, "default_mm_loras", None)
    return f"default {canonical(defaults)}" if defaults else "none"


def scales_source(cache: Any, engine_id: str) -> str:
    """Where the scales of a quantized KV cache come from."""
    if cache.cache_dtype in _UNSCALED:
        return "none"
    if getattr(cache, "calculate_kv_scales", False):
        # From the first batch that an engine happens to run: no other engine's are equal.
        return f"calculated by engine {engine_id}"
    return "per token and head" if "per_token_head" in str(cache.cache_dtype) else "checkpoint"


def attention_packing(layer: Any) -> str:
    """An attention layer's backend, and the instruction set that packs its blocks where there is one."""
    name = str(layer.get_attn_backend().get_name())
    isa = getattr(layer, "isa", None)
    return f"{name} isa={isa}" if isa else name


def kv_dtypes(kv_cache_config: Any, layers: Mapping[str, Any]) -> str:
    """How the cells of these layers are stored."""
    dtypes = set()
    for group in kv_cache_config.transfer_groups:
        for name in set(layers).intersection(group.layer_names):
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            stored = [_dtype(spec.dtype), spec.kv_quant_mode.name.lower()]
            # Formats of one width look alike, above all fp8's two.
            asked = str(getattr(layers[name], "kv_cache_dtype", "auto"))
            stored += [] if asked in _UNSCALED else [_ALIASES.get(asked, asked)]
            dtypes.add(" ".join(stored))
    return _summary(dtypes)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _summary(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))
