# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tensors, described so that the daemon finds every cell."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpush_client.layout import Group, GroupKind
from kvpush_client.vllm.layout import LayoutError, describe, keeps_token_rows
from kvpush_client.vllm.layout import window as look_back

BLOCKS, HEADS, TOKENS, HEAD = 5, 2, 16, 8
NAMES = tuple(f"model.layers.{i}.self_attn.attn" for i in range(12))
CELL = 2 * HEAD * 2


def full(**changes):
    return FullAttentionSpec(
        **{"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.bfloat16} | changes
    )


def window():
    return SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.bfloat16, sliding_window=32
    )


def config(groups, replicas=1):
    page = HEADS * TOKENS * CELL
    tensors = [
        KVCacheTensor(
            size=BLOCKS * page * len(NAMES),
            layers=[name],
            offset=index * page * BLOCKS,
            layer_stride=page * BLOCKS,
            block_stride=page,
        )
        for index, name in enumerate(NAMES)
    ]
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_tp_replicas=replicas
    )


class Cache:
    """A pool of random bytes, cut as vLLM's LBHNC layout cuts it."""

    def __init__(self):
        page = HEADS * TOKENS * CELL
        self.raw = torch.randint(-128, 127, (len(NAMES) * BLOCKS * page,), dtype=torch.int8)
        cells = self.raw.view(torch.bfloat16).view(len(NAMES), BLOCKS, HEADS, TOKENS, 2 * HEAD)
        self.tensors = {name: cells[index] for index, name in enumerate(NAMES)}

    def describe(self, groups=None, *, tensors=None, replicas=1, tp_rank=0, tp_size=1, rows=True):
        return describe(
            tensors or self.tensors,
            config(groups or [KVCacheGroupSpec(list(NAMES), full())], replicas),
            address=self.raw.data_ptr(),
            nbytes=self.raw.nbytes,
            tp_rank=tp_rank,
            tp_size=tp_size,
            token_rows=lambda name: rows,
        )


@pytest.fixture
def cache():
    return Cache()


def test_every_cell_is_where_the_layout_says(cache):
    layout = cache.describe()
    assert layout.pool_bytes == cache.raw.nbytes
    assert layout.groups == (Group(TOKENS, GroupKind.FULL),)
    for layer in layout.layers:
        [plane] = layer.planes
        for block, head, token in ((0, 0, 0), (4, 1, 15), (2, 0, 7)):
            at = (
                plane.offset
                + block * plane.block_stride
                + head * plane.head_stride
                + token * plane.token_stride
            )
            found = cache.raw[at : at + plane.cell_bytes]
            assert torch.equal(found, cache.tensors[layer.name][block, head, token].view(torch.int8))


def test_layers_are_in_the_order_of_the_forward_pass(cache):
    backwards = {name: cache.tensors[name] for name in reversed(NAMES)}
    layout = cache.describe([KVCacheGroupSpec(sorted(NAMES), full())], tensors=backwards)
    assert tuple(layer.name for layer in layout.layers) == NAMES


def test_layers_belong_to_the_groups_that_vllm_says(cache):
    layout = cache.describe(
        [KVCacheGroupSpec(list(NAMES[::2]), full()), KVCacheGroupSpec(list(NAMES[1::2]), window())]
    )
    assert [group.kind for group in layout.groups] == [GroupKind.FULL, GroupKind.SLIDING_WINDOW]
    assert [layer.group for layer in layout.layers] == [0, 1] * 6


def test_a_window_is_how_far_attention_looks_back():
    common = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.bfloat16}
    chunked = ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)
    both = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"a": window(), "b": chunked})
    assert [look_back(spec) for spec in (full(), window(), chunked, both)] == [None, 32, 64, 64]
    assert look_back(full(sliding_window=32)) is None  # vLLM keeps all of it


def test_a_rank_says_which_of_all_heads_it_holds(cache):
    layer = cache.describe(tp_rank=3, tp_size=4).layers[0]
    assert (layer.first_head, layer.heads, layer.total_heads) == (6, 2, 8)


def test_replicated_heads_are_said_to_be_copies(cache):
    layout = cache.describe(replicas=2, tp_rank=3, tp_size=4)
    layer = layout.layers[0]
    assert (layer.first_head, layer.heads, layer.total_heads) == (2, 2, 4)
    assert (layout.replica, layout.replicas) == (1, 2)


def test_a_backend_that_packs_its_blocks_is_opaque(cache):
    assert [layer.opaque for layer in cache.describe(rows=False).layers] == [True] * 12
    assert [layer.opaque for layer in cache.describe(rows=True).layers] == [False] * 12


def backend(name, **attributes):
    return SimpleNamespace(get_name=lambda: name, **attributes)


def test_token_rows_are_what_a_backend_says_or_is_known_for():
    assert not keeps_token_rows(backend("CPU_ATTN"))
    assert not keeps_token_rows(backend("UNHEARD_OF"))
    assert keeps_token_rows(backend("FLASH_ATTN"))
    assert keeps_token_rows(backend("UNHEARD_OF", kvpush_token_rows=True))


def test_a_tensor_outside_the_pool_is_named(cache):
    elsewhere = cache.tensors | {NAMES[3]: torch.zeros_like(cache.tensors[NAMES[3]])}
    with pytest.raises(LayoutError, match=rf"{NAMES[3]}.*get_mem_pool_context"):
        cache.describe(tensors=elsewhere)


def test_a_missing_layer_is_named(cache):
    without = {name: cache.tensors[name] for name in NAMES[1:]}
    with pytest.raises(LayoutError, match=NAMES[0]):
        cache.describe(tensors=without)


def test_blocks_that_the_kernel_splits_are_refused(cache):
    split = {
        name: tensor.reshape(BLOCKS * 2, HEADS, TOKENS // 2, 2 * HEAD)
        for name, tensor in cache.tensors.items()
    }
    with pytest.raises(LayoutError, match="shape"):
        cache.describe(tensors=split)


def test_tokens_with_gaps_are_refused(cache):
    gaps = {
        name: tensor.transpose(2, 3).transpose(2, 3)[..., :HEAD] for name, tensor in cache.tensors.items()
    }
    with pytest.raises(LayoutError, match="rows without gaps"):
        cache.describe(tensors=gaps)


def test_state_layers_are_refused(cache):
    state = MambaSpec(block_size=TOKENS, shapes=((4,),), dtypes=(torch.bfloat16,))
    with pytest.raises(LayoutError, match="MambaSpec"):
        cache.describe([KVCacheGroupSpec(list(NAMES), state)])
