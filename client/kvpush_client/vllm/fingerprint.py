# SPDX-License-Identifier: Apache-2.0
"""What must be equal in two engines for the KV of one to mean the same in the other.

Where the model lies does not matter, only what it is. Nothing here reads a whole checkpoint: of a weights
file its size, its header and a few samples of its bytes count, which tell a fine-tune from its base.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROTOCOL = "1"
"""Of the connector: changes whenever two connectors of different versions would not understand each other."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 8
_SAMPLE_BYTES = 4096
_MAX_HEADER = 4 << 20
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
# What a configuration says about where it came from, or who wrote it.
_PROVENANCE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"})


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
        "compute": f"{_dtype(model.dtype)} {model.quantization or 'unquantized'}",
        "adapter": adapter_identity(vllm_config.lora_config),
        "kv_dtype": kv_dtypes(kv_cache_config, layers),
        "kv_scales": scales_source(cache, str(vllm_config.kv_transfer_config.engine_id)),
        "attention": _summary(attention_packing(layer) for layer in layers.values()),
        "rope": _canonical({key: getattr(text, key, None) for key in _ROPE_KEYS}),
        "head_size": _summary(str(getattr(layer, "head_size", "?")) for layer in layers.values()),
    }


def model_identity(model: Any, load: Any) -> str:
    """What the model is: a hash over its configuration and weights, or the commit of a hub's snapshot."""
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else repr(model.hf_overrides)
    parts: list[str] = [_canonical(_without_provenance(_configuration(model))), _canonical(overrides)]
    folder = Path(model.model)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if str(load.load_format) == "dummy":
        parts.append(f"dummy weights from seed {model.seed}")
    elif folder.is_dir():
        parts.extend(_weights(folder))
    elif commit:
        parts.append(f"commit {commit}")
    else:
        parts.append(f"{folder.name} at {model.revision}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def adapter_identity(lora: Any) -> str:
    """Requests with an adapter of their own aren't transferred; an adapter that all requests bear counts."""
    defaults = getattr(lora, "default_mm_loras", None)
    return f"default {_canonical(defaults)}" if defaults else "none"


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


def kv_dtypes(kv_cache_config: Any, layers: Iterable[str]) -> str:
    """How the cells of these layers are stored."""
    dtypes = set()
    for group in kv_cache_config.transfer_groups:
        for name in set(layers).intersection(group.layer_names):
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            dtypes.add(f"{_dtype(spec.dtype)} {spec.kv_quant_mode.name.lower()}")
    return _summary(dtypes)


def _configuration(model: Any) -> Any:
    """As it lies in the model's folder; vLLM changes its own copy to suit the engine."""
    path = Path(model.model) / "config.json"
    if path.is_file():
        return json.loads(path.read_bytes())
    return model.hf_config.to_dict()


def _without_provenance(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_provenance(v) for k, v in value.items() if k not in _PROVENANCE}
    return value


def _weights(folder: Path) -> list[str]:
    paths = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    return [f"{path.name} {path.stat().st_size} {_sampled(path)}" for path in paths]


def _sampled(path: Path) -> str:
    """A hash over the header and evenly spread samples of a file."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        header = 8 + int.from_bytes(os.pread(fd, 8, 0), "little") if path.suffix == ".safetensors" else 0
        digest.update(os.pread(fd, min(header, _MAX_HEADER), 0))
        for sample in range(_SAMPLES):
            # The first begins at the start of the data, the last ends with it.
            offset = header + max(0, size - header - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
            digest.update(os.pread(fd, _SAMPLE_BYTES, offset))
    finally:
        os.close(fd)
    return digest.hexdigest()


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _summary(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _canonical(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    # The daemon keeps and compares short values only.
    return text if len(text) <= 512 else hashlib.sha256(text.encode()).hexdigest()
