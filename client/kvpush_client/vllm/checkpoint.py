# SPDX-License-Identifier: Apache-2.0
"""Which model an engine computes with: its configuration and its weights, wherever they lie.

No checkpoint is read whole. Of a weights file its size and its header count, and samples of its bytes: of
each tensor, where the file says where they are, so that a fine-tune of one tensor is told from its base.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE_BYTES = 256
_PER_TENSOR = 3
_MOST_SAMPLES = 1 << 15
"""Of the tensors of a checkpoint, in all files together: a tenth of a second, if its pages are in memory."""
_SPREAD = 128
"""Samples of a file that does not say where its tensors are."""
_MAX_HEADER = 100 << 20
# What a configuration says about where it came from, or who wrote it.
_PROVENANCE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"})


def model_identity(model: Any, load: Any) -> str:
    """What a model is: a hash over its configuration and weights, or the commit of a hub's snapshot."""
    parts = [_configuration(model), _overrides(model.hf_overrides)]
    if processing := _processing(getattr(model, "multimodal_config", None)):
        parts.append(processing)
    if elsewhere := getattr(model, "model_weights", ""):
        # The folder holds no weights: they are streamed from there.
        parts.append(f"weights of {elsewhere}")
    path = Path(model.model)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if str(load.load_format) == "dummy":
        parts.append(f"dummy weights from seed {model.seed}")
    elif path.exists():
        parts.extend(_weights(path))
    elif commit and not model.hf_config_path:
        parts.append(f"commit {commit}")
    else:
        # Where the configuration is from elsewhere, its commit says nothing of the weights.
        parts.append(f"{path.name} at {getattr(model.revision, 'resolved', None) or model.revision}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def canonical(value: Any) -> str:
    """The same for equal values, and short: the daemon keeps and compares short values only."""
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= 512 else hashlib.sha256(text.encode()).hexdigest()


def _configuration(model: Any) -> str:
    """As it lies in its folder; vLLM changes its own copy to suit the engine."""
    folder = Path(model.hf_config_path or model.model)
    found: dict[str, Any] = {}
    if (path := folder / "config.json").is_file():
        found["config"] = _without_provenance(json.loads(path.read_bytes()))
    if (path := folder / "params.json").is_file():
        # Mistral's own format, which may lie beside.
        found["params"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if not found:
        commit = getattr(model.hf_config, "_commit_hash", None)
        found["elsewhere"] = commit or _without_provenance(model.hf_config.to_dict())
    return canonical(found)


def _without_provenance(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_provenance(v) for k, v in value.items() if k not in _PROVENANCE}
    return value


def _overrides(overrides: Any) -> str:
    """By name where they are a function: its repr has an address, which no other process has."""
    if isinstance(overrides, functools.partial):
        return " ".join(_overrides(part) for part in (overrides.func, *overrides.args))
    if callable(overrides):
        return f"{overrides.__module__}.{getattr(overrides, '__qualname__', type(overrides).__qualname__)}"
    return canonical(overrides)


def _processing(multimodal: Any) -> str:
    """What an engine is told of how media become embeddings, if it is told something."""
    names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
    told = {name: value for name in names if (value := getattr(multimodal, name, None))}
    return canonical(told) if told else ""


def _weights(path: Path) -> list[str]:
    found = [path] if path.is_file() else {file for pattern in _WEIGHTS for file in path.glob(pattern)}
    files = sorted(found)
    headers = [_header(file) for file in files]
    spans = [
        _tensors(header, file.stat().st_size) if header else []
        for file, header in zip(files, headers, strict=True)
    ]
    tensors = max(1, sum(map(len, spans)))
    each = max(1, min(_PER_TENSOR, _MOST_SAMPLES // tensors))
    step = -(-tensors * each // _MOST_SAMPLES)
    parts = []
    for file, header, inside in zip(files, headers, spans, strict=True):
        size = file.stat().st_size
        offsets = {offset for span in inside[::step] for offset in _evenly(*span, each)}
        sampled = _sampled(file, header, sorted(offsets or set(_evenly(0, size, _SPREAD))))
        parts.append(f"{file.name} {size} {sampled}")
    return parts


def _header(path: Path) -> bytes:
    """A safetensors file's length of its header, and the header; of another file, nothing."""
    if path.suffix != ".safetensors":
        return b""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), _MAX_HEADER))


def _tensors(header: bytes, size: int) -> list[tuple[int, int]]:
    """Where the tensors of a file of `size` bytes begin and end, in its order; none where it is broken."""
    data = len(header)
    try:
        entries = [
            entry["data_offsets"] for name, entry in json.loads(header[8:]).items() if name != "__metadata__"
        ]
        return sorted(
            (data + int(begin), data + int(end)) for begin, end in entries if data + int(end) <= size
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _evenly(begin: int, end: int, count: int) -> list[int]:
    """Where `count` samples of these bytes begin: the first at their start, the last ends with them."""
    room = max(0, end - begin - _SAMPLE_BYTES)
    if count == 1:
        return [begin + room // 2]
    return [begin + room * index // (count - 1) for index in range(count)]


def _sampled(path: Path, header: bytes, offsets: list[int]) -> str:
    digest = hashlib.sha256(header)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        # All are asked for before the first is waited for: they come at once, and so from a distant disk too.
        for offset in offsets:
            os.posix_fadvise(fd, offset, _SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)
        for offset in offsets:
            digest.update(os.pread(fd, _SAMPLE_BYTES, offset))
    finally:
        os.close(fd)
    return digest.hexdigest()
