# SPDX-License-Identifier: Apache-2.0
"""What is refused of the layouts and block lists that engines and peers send."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush_client.layout import Group, GroupKind, Layer, Layout, Plane
from kvpushd.core.engines import Engine
from kvpushd.core.layout import Blocks, bytes_per_position, check, check_blocks, unit_bytes
from kvpushd.core.words import Incarnation
from kvpushd.errors import Invalid
from tests.core.pools import Model, Shape, address, changed, listed, rank

SHAPE = Shape((Group(4), Group(4, GroupKind.SLIDING_WINDOW)), blocks=8)
POOL = rank(Model((0, 1), heads=2, planes=(4, 4)), SHAPE)
HUGE = 2**64 - 1


def plane(layout: Layout, **fields: int) -> Layout:
    """The layout with fields of its first layer's first plane replaced."""
    first, *others = layout.layers[0].planes
    return changed(layout, planes=(replace(first, **fields), *others))


def test_a_position_takes_what_all_heads_and_planes_of_layers_without_a_window_keep_of_it() -> None:
    model, groups = Model((0, 1, 0), heads=3, planes=(4, 2)), SHAPE.groups
    for layers, size in ((range(3), 36), (range(2), 18), (range(1, 2), 0)):
        assert bytes_per_position(rank(model, Shape(groups, blocks=8), layers)).total() == size


def test_where_blocks_move_whole_all_positions_of_the_last_one_are_due() -> None:
    """Else half of the heads, sent as whole blocks, could pass for all of them."""
    for opaque, due in ((True, 16), (False, 10)):
        engine = Engine(Incarnation(b"e"), "E", {}, 1, 1)
        engine.add(0, rank(Model((0,), heads=2, planes=(1,), opaque=opaque), Shape((Group(4),), blocks=8)))
        assert engine.takes(5) == due


def test_a_layout_that_fills_its_pool_to_the_last_byte_is_taken() -> None:
    check(POOL)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (replace(POOL, pool_bytes=POOL.pool_bytes - 1), "ends at byte 1,024 but the pool has 1,023"),
        (replace(POOL, pool_bytes=0), "pool_bytes is 0"),
        (replace(POOL, pool_bytes=HUGE), f"pool_bytes is {HUGE}"),
        (replace(POOL, blocks=0), "blocks is 0"),
        (replace(POOL, blocks=9), "planes[1] overlaps planes[0]"),
        (replace(POOL, blocks=2**32 - 1), "blocks is 4294967295"),
        (replace(POOL, replicas=0), "replicas is 0"),
        (replace(POOL, replica=2, replicas=2), "replica is 2, expected 0 to 1"),
        (replace(POOL, groups=()), "number of groups is 0"),
        (replace(POOL, groups=(Group(4),) * 65), "number of groups is 65"),
        (replace(POOL, groups=POOL.groups[:1]), "layer 'layers.1': group is 1, expected 0 to 0"),
        (replace(POOL, groups=(Group(0), Group(4))), "groups[0].block_size is 0"),
        (replace(POOL, groups=(Group(2**32 - 1), Group(4))), "groups[0].block_size is 4294967295"),
        (replace(POOL, groups=(Group(5), Group(4))), "cells overlap"),
        (replace(POOL, layers=()), "number of layers is 0"),
        (replace(POOL, layers=POOL.layers * 2049), "number of layers is 4098"),
        (replace(POOL, layers=(POOL.layers[0], POOL.layers[0])), "two layers are named 'layers.0'"),
        (changed(POOL, name=""), "layers[0]: length of name is 0"),
        (changed(POOL, name="x" * 513), "layers[0]: length of name is 513"),
        (changed(POOL, heads=0), "heads is 0"),
        (changed(POOL, heads=3), "heads is 3, expected 1 to 2"),
        (changed(POOL, total_heads=2**32 - 1), "total_heads is 4294967295"),
        (changed(POOL, first_head=1), "first_head is 1, expected 0 to 0"),
        (changed(POOL, planes=()), "number of planes is 0"),
        (changed(POOL, planes=POOL.layers[0].planes * 5), "number of planes is 10"),
        (plane(POOL, cell_bytes=0), "planes[0].cell_bytes is 0"),
        (plane(POOL, cell_bytes=5), "cells overlap"),
        (plane(POOL, cell_bytes=2**32 - 1), "planes[0].cell_bytes is 4294967295"),
        (plane(POOL, offset=HUGE), f"planes[0].offset is {HUGE}"),
        (plane(POOL, block_stride=HUGE), f"planes[0].block_stride is {HUGE}"),
        (plane(POOL, head_stride=HUGE), f"planes[0].head_stride is {HUGE}"),
        (plane(POOL, token_stride=HUGE), f"planes[0].token_stride is {HUGE}"),
        (plane(POOL, block_stride=1024), "ends at byte"),
        (plane(POOL, block_stride=0), "cells overlap"),
        (plane(POOL, head_stride=0), "cells overlap"),
        (plane(POOL, token_stride=0), "cells overlap"),
        (plane(POOL, token_stride=3), "cells overlap"),
        (plane(POOL, offset=8), "planes[1] overlaps planes[0]"),
        (plane(POOL, offset=POOL.layers[0].planes[1].offset), "planes[1] overlaps planes[0]"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_was_wrong(layout: Layout, said: str) -> None:
    with pytest.raises(Invalid, match=re.escape(said)):
        check(layout)


def test_layers_of_different_groups_may_overlay_one_another() -> None:
    check(rank(Model((0, 1), heads=2), replace(SHAPE, overlay=True)))


def test_k_and_v_may_alternate_by_token_by_head_or_by_block() -> None:
    for order in ("LBHNP", "LBHPN", "LBPHN", "LPBHN", "PLBHN"):
        check(rank(Model((0,), heads=2, planes=(4, 2)), Shape((Group(4),), order=order)))


def test_planes_of_unequal_cells_may_follow_one_another_inside_a_block() -> None:
    keys, scales = Plane(0, 72, 32, 8, 8), Plane(64, 72, 4, 1, 1)
    layout = Layout(9 * 72, 8, (Group(4),), (Layer("a", 0, 0, 2, 2, (keys, scales)),))
    check(layout)
    for offset in (63, 65):
        with pytest.raises(Invalid, match="overlaps"):
            check(changed(layout, planes=(keys, replace(scales, offset=offset))))


def test_token_strides_of_opaque_layers_are_not_looked_at() -> None:
    opaque = rank(Model((0,), heads=2, opaque=True), Shape((Group(4),)))
    check(plane(opaque, token_stride=opaque.pool_bytes))
    assert unit_bytes(opaque, opaque.layers[0], opaque.layers[0].planes[0]) == 16


@given(st.data())
def test_whatever_passes_the_check_has_every_cell_inside_the_pool_and_to_itself(data: st.DataObject) -> None:
    offset, stride, cell = (
        st.integers(0, 30),
        st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24]),
        st.integers(1, 3),
    )
    first = data.draw(st.builds(Plane, offset, stride, stride, stride, cell))
    second = st.builds(Plane, offset, stride, stride, stride, cell)
    alike = st.builds(replace, st.just(first), offset=offset, cell_bytes=cell)
    planes = [first, *data.draw(st.lists(st.one_of(alike, alike, second), max_size=2))]
    layout = Layout(
        pool_bytes=data.draw(st.integers(1, 160)),
        blocks=data.draw(st.integers(1, 3)),
        groups=(Group(data.draw(st.integers(1, 3))),),
        layers=(Layer("a", 0, 0, data.draw(st.integers(1, 3)), 3, tuple(planes), data.draw(st.booleans())),),
    )
    try:
        check(layout)
    except Invalid:
        return
    layer = layout.layers[0]
    used = np.zeros(layout.pool_bytes, np.int64)
    for each in layer.planes:
        size = unit_bytes(layout, layer, each)
        for block in range(layout.blocks):
            for head in range(layer.heads):
                for token in range(1 if layer.opaque else layout.groups[0].block_size):
                    begin = address(each, block, head, token)
                    assert begin + size <= layout.pool_bytes
                    used[begin : begin + size] += 1
    assert used.max() == 1


def test_block_lists_that_hold_what_was_asked_for_are_taken() -> None:
    check_blocks(POOL, [listed(0, 0, 1, 2), listed(8, 7, group=1)], 0, 12)
    check_blocks(POOL, [listed(4, 1, 2), listed(8, 7, group=1)], 6, 11)


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([listed(0, 0, group=2)], "group of a block list is 2, expected 0 to 1"),
        ([listed(0, 0, group=-1)], "group of a block list is -1"),
        ([listed(0, 0), listed(4, 1)], "blocks of group 0 are listed twice"),
        ([listed(2, 0)], "start at position 2, expected a multiple of the block size 4"),
        ([listed(-4, 0)], "start is -4"),
        ([listed(2**32 - 4, 0)], "start is 4294967292"),
        ([listed(2**31 - 4, 0)], "one past the last position is 2147483648"),
        ([listed(0, 0, 8)], "highest block id is 8, expected 0 to 7"),
        ([listed(0, 0, -1)], "lowest block id is -1"),
        ([listed(0, 2, 1, 2)], "name block 2 twice"),
        ([listed(0, *range(9))], "number of blocks is 9, expected 0 to 8"),
    ],
)
def test_block_lists_that_cannot_be_are_refused_with_what_was_wrong(lists: list[Blocks], said: str) -> None:
    with pytest.raises(Invalid, match=re.escape(said)):
        check_blocks(POOL, lists)


@pytest.mark.parametrize(
    ("lists", "start", "end", "said"),
    [
        ([listed(0, 0)], 0, 4, "blocks of group 1 are missing: positions 0 to 4 need them"),
        ([listed(0, 0), listed(0, group=1)], 0, 4, "blocks of group 1 are missing"),
        ([listed(4, 0), listed(4, 1, group=1)], 3, 8, "group 0 start at position 4, expected 3 or before"),
        ([listed(0, 0), listed(4, 1, group=1)], 0, 8, "group 0 hold positions up to 4, expected 8 or more"),
        (
            [listed(0, 0, 2), listed(0, 1, group=1)],
            0,
            8,
            "group 1 hold positions up to 4, expected 8 or more",
        ),
        ([listed(0, 0, 2), listed(8, 1, group=1)], 0, 8, "group 1 start at position 8, expected before 8"),
        ([], 0, 0, "end is 0"),
        ([], 4, 4, "start is 4, expected 0 to 3"),
        ([], 0, 2**32 - 1, "end is 4294967295"),
    ],
)
def test_block_lists_that_lack_a_position_are_refused(
    lists: list[Blocks], start: int, end: int, said: str
) -> None:
    with pytest.raises(Invalid, match=re.escape(said)):
        check_blocks(POOL, lists, start, end)


def test_a_group_without_layers_in_this_pool_needs_no_blocks() -> None:
    stage = rank(Model((0, 1), heads=2), SHAPE, layers=range(1))
    check_blocks(stage, [listed(0, 0)], 0, 4)
