# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV cache tensors to the layout that the daemon computes addresses with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpush_client.layout import Group, GroupKind, Layer, Layout, Plane

ROW_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Backends known to keep the K and V of a token, per head, in one contiguous row."""

_OTHERS = (RSWASpec, CircularBufferSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec)


class LayoutError(RuntimeError):
    """The cache can't be described; says which layer, what was found, what was expected."""


def keeps_token_rows(backend: Any) -> bool:
    """Whether single tokens of a (block, head) can be addressed in a cache of this attention backend.

    A backend may say so itself, by a class attribute `kvpush_token_rows = True`. What neither says so nor is
    known is opaque: vLLM's CPU kernels, for one, pack a block as their instruction set likes it.
    """
    return bool(getattr(backend, "kvpush_token_rows", False)) or backend.get_name() in ROW_BACKENDS


def describe(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    *,
    address: int,
    nbytes: int,
    tp_rank: int,
    tp_size: int,
    token_rows: Callable[[str], bool],
) -> Layout:
    """The layout of a rank's pool of `nbytes` bytes at `address`.

    `kv_caches` are vLLM's, by layer: tensors of shape (blocks, heads, tokens, content). Layers that share
    another's cache are left out. `token_rows` says of a layer whether its tokens can be addressed.

    Raises LayoutError if a tensor lies outside the pool, or is cut in a way that a layout can't say.
    """
    replicas = int(kv_cache_config.kv_tp_replicas)
    groups, layers = [], []
    for index, group in enumerate(kv_cache_config.transfer_groups):
        groups.append(_group(index, group.kv_cache_spec))
        for name in group.layer_names:
            if name not in kv_caches:
                raise LayoutError(f"layer {name}: vLLM registered no cache for it")
            plane, heads = _plane(
                name, kv_caches[name], address, nbytes, int(kv_cache_config.num_blocks), groups[-1].block_size
            )
            layers.append(
                Layer(
                    name=name,
                    group=index,
                    first_head=tp_rank // replicas * heads,
                    heads=heads,
                    total_heads=heads * tp_size // replicas,
                    planes=(plane,),
                    opaque=not token_rows(name),
                )
            )
    layers.sort(key=lambda layer: _depth(layer.name))
    return Layout(
        pool_bytes=nbytes,
        blocks=int(kv_cache_config.num_blocks),
        groups=tuple(groups),
        layers=tuple(layers),
        replica=tp_rank % replicas,
        replicas=replicas,
    )


def window(spec: Any) -> int | None:
    """How many positions the attention of a group's layers looks back at most; None = all of them."""
    reach = 0
    for single in _singles(spec):
        if isinstance(single, SlidingWindowSpec):
            # vLLM keeps some more of them for draft modules.
            reach = max(reach, int(single.sliding_window) + int(getattr(single, "extra_retained_tokens", 0)))
        elif isinstance(single, ChunkedLocalAttentionSpec):
            reach = max(reach, int(single.attention_chunk_size))
        else:
            return None
    return reach


def _singles(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _group(index: int, spec: Any) -> Group:
    kinds = {_kind(index, single) for single in _singles(spec)}
    if len(kinds) != 1:
        raise LayoutError(f"group {index} mixes {sorted(k.value for k in kinds)} layers; expected one kind")
    return Group(block_size=int(spec.block_size), kind=kinds.pop())


def _kind(index: int, spec: Any) -> GroupKind:
    if isinstance(spec, AttentionSpec) and not isinstance(spec, _OTHERS):
        if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
            return GroupKind.SLIDING_WINDOW
        if isinstance(spec, FullAttentionSpec):
            return GroupKind.FULL
    raise LayoutError(
        f"group {index} is of {type(spec).__name__}: only full, sliding-window and chunked attention can be "
        "transferred by this build"
    )


def _plane(name: str, tensor: Any, address: int, nbytes: int, blocks: int, tokens: int) -> tuple[Plane, int]:
    if tensor.dim() != 4 or tensor.shape[0] != blocks or tensor.shape[2] != tokens:
        raise LayoutError(
            f"layer {name}: its cache has shape {tuple(tensor.shape)}, expected ({blocks}, heads, {tokens}, "
            "content): a block that the kernel splits or packs otherwise can't be described"
        )
    item = tensor.element_size()
    block, head, token, element = (int(stride) * item for stride in tensor.stride())
    heads, cell = int(tensor.shape[1]), int(tensor.shape[3]) * item
    if element != item or token != cell:
        raise LayoutError(
            f"layer {name}: a block's tokens are {token} bytes apart and {cell} bytes long, in steps of "
            f"{element}; expected rows without gaps"
        )
    offset = int(tensor.data_ptr()) - address
    end = offset + (blocks - 1) * block + (heads - 1) * head + tokens * cell
    if offset < 0 or end > nbytes:
        raise LayoutError(
            f"layer {name}: its cache is bytes {offset:,} to {end:,} of a pool of {nbytes:,}: vLLM allocated "
            "it elsewhere than in get_mem_pool_context()"
        )
    return Plane(offset, block, head, token, cell), heads


def _depth(name: str) -> int:
    """Where the forward pass reaches a layer: the first number in its name; what has none comes last."""
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 1 << 30
