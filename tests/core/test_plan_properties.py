# SPDX-License-Identifier: Apache-2.0
"""`plan` against copying cell by cell."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpush_client.layout import Group, GroupKind, Layout
from kvpushd.core.layout import BlockLists, Blocks, Window, check, check_blocks, reach
from kvpushd.core.overlap import covers, granularity, mappable, sends, shared_layers
from kvpushd.core.plan import plan, window_bytes
from kvpushd.core.runs import order_of
from tests.core.pools import (
    Model,
    Shape,
    address,
    apply,
    copy_by_cell,
    fresh,
    is_sorted_and_merged,
    rank,
    ranks,
)

MAX_POSITIONS = 26

ORDERS = st.one_of(
    st.sampled_from(["LPBHN", "LBPHN", "LBNPH", "LBNHP", "BLPHN", "BPLNH", "PLBNH"]),
    st.permutations("LPBHN").map("".join),
)


@dataclass(frozen=True)
class Case:
    """Two engines of one model, and the lists that their schedulers would name for one request."""

    model: Model
    source: Shape
    source_blocks: BlockLists
    target: Shape
    target_blocks: BlockLists
    end: int


@st.composite
def models(draw: st.DrawFn, heads: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> Model:
    planes = draw(st.sampled_from([(4,), (2, 2), (3, 1)]))
    group_of = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
    return Model(tuple(group_of), draw(st.sampled_from(heads)), planes, draw(st.booleans()))


@st.composite
def sides(
    draw: st.DrawFn, kinds: tuple[GroupKind, GroupKind], sizes: tuple[int, int], end: int
) -> tuple[Shape, BlockLists]:
    groups = tuple(Group(size, kind) for size, kind in zip(sizes, kinds, strict=True))
    starts, counts = [], []
    for group in groups:
        blocks = -(-end // group.block_size)
        # Any list may begin late: a prefix that the receiver has, a window that has moved on.
        first = draw(st.integers(0, blocks - 1))
        starts.append(first * group.block_size)
        # And it may end early, where the frontier or the reservation has not come further, or late.
        counts.append(max(0, blocks - first + draw(st.sampled_from([0, 0, 0, 1, -1, -2]))))
    spare = draw(st.integers(0, 2))
    shape = Shape(
        groups,
        blocks=max(1, sum(counts) + spare),
        order=draw(ORDERS),
        padding=draw(st.sampled_from([0, 0, 1, 16])),
        overlay=draw(st.booleans()),
    )
    ordered = list(range(shape.blocks))
    ids = draw(st.one_of(st.just(ordered), st.permutations(ordered)))
    lists = [
        Blocks(0, starts[0], np.array(ids[: counts[0]], np.int64)),
        Blocks(1, starts[1], np.array(ids[counts[0] : counts[0] + counts[1]], np.int64)),
    ]
    return shape, lists


@st.composite
def cases(draw: st.DrawFn, heads: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> Case:
    model = draw(models(heads))
    kinds = (GroupKind.FULL, draw(st.sampled_from([GroupKind.FULL, GroupKind.SLIDING_WINDOW])))
    end = draw(st.integers(1, MAX_POSITIONS))
    block_size = st.sampled_from([1, 2, 3, 4, 8])
    if model.opaque:
        # One size for the pool: its units are as large as the largest block.
        size = draw(block_size)
        mine = theirs = (size, size)
    else:
        mine = (draw(block_size), draw(block_size))
        theirs = (draw(block_size), draw(block_size))
    source, source_blocks = draw(sides(kinds, mine, end))
    target, target_blocks = draw(sides(kinds, theirs, end))
    return Case(model, source, source_blocks, target, target_blocks, end)


@st.composite
def spans(draw: st.DrawFn, whole: int) -> range:
    start = draw(st.integers(0, whole - 1))
    return range(start, draw(st.integers(start + 1, whole)))


@st.composite
def windows(draw: st.DrawFn, case: Case, layers: int) -> Window:
    start = draw(st.integers(0, case.end - 1))
    end = draw(st.integers(start, case.end))
    if case.model.opaque:
        start -= start % case.source.groups[0].block_size
    first = draw(st.integers(0, layers))
    return Window(start, end, first, draw(st.integers(first, layers)))


@given(st.one_of([st.lists(st.integers(5, high), min_size=1) for high in (9, 200, 1 << 40)]))
def test_numbers_are_ordered_whether_close_together_far_apart_or_doubled(numbers: list[int]) -> None:
    order = order_of(np.array(numbers, np.int64))
    assert sorted(order.tolist()) == list(range(len(numbers)))
    assert [numbers[i] for i in order] == sorted(numbers)


@given(st.data())
def test_a_plan_moves_what_copying_cell_by_cell_moves_and_nothing_else(data: st.DataObject) -> None:
    case = data.draw(cases())
    source = rank(
        case.model, case.source, data.draw(spans(case.model.layers)), data.draw(spans(case.model.heads))
    )
    target = rank(
        case.model, case.target, data.draw(spans(case.model.layers)), data.draw(spans(case.model.heads))
    )
    window = data.draw(windows(case, len(source.layers)))
    memory, expected, actual = fresh(source, 1), fresh(target, -1), fresh(target, -1)

    mappable(source, target)
    runs = plan(source, case.source_blocks, target, case.target_blocks, window)
    written = apply(runs, memory, actual)
    copied = copy_by_cell(source, case.source_blocks, memory, target, case.target_blocks, expected, window)

    assert (actual == expected).all()
    assert written.max(initial=0) <= 1
    assert runs.length.sum() == copied
    assert is_sorted_and_merged(runs)
    assert copied <= window_bytes(source, target, window)


@given(st.data())
def test_the_bytes_of_a_window_are_known_without_a_plan(data: st.DataObject) -> None:
    case = data.draw(cases())
    source = rank(case.model, case.source, data.draw(spans(case.model.layers)))
    target = rank(case.model, case.target, None, data.draw(spans(case.model.heads)))
    window = data.draw(windows(case, len(source.layers)))
    whole = Window(0, case.end, 0, len(source.layers))
    held = all(
        lists[layer.group].start == 0 and reach(pool, lists[layer.group]) >= case.end
        for pool, lists in ((source, case.source_blocks), (target, case.target_blocks))
        for layer in source.layers
    )

    moved = int(plan(source, case.source_blocks, target, case.target_blocks, window).length.sum())

    assert moved <= window_bytes(source, target, window) <= window_bytes(source, target, whole)
    if held:
        assert moved == window_bytes(source, target, window)


@given(st.data())
def test_windows_that_share_nothing_write_every_byte_once_and_together_write_all(data: st.DataObject) -> None:
    case = data.draw(cases())
    source = rank(case.model, case.source)
    target = rank(case.model, case.target, None, data.draw(spans(case.model.heads)))
    step = granularity(source, target)
    marks = data.draw(st.sets(st.integers(0, case.end - 1).map(lambda p: p // step * step), max_size=3))
    positions = sorted({0, case.end} | marks)
    layers = sorted(
        {0, case.model.layers} | data.draw(st.sets(st.integers(0, case.model.layers), max_size=2))
    )
    rectangles = [Window(a, b, c, d) for a, b in pairwise(positions) for c, d in pairwise(layers)]
    memory, expected, actual = fresh(source, 1), fresh(target, -1), fresh(target, -1)

    once = plan(
        source, case.source_blocks, target, case.target_blocks, Window(0, case.end, 0, case.model.layers)
    )
    apply(once, memory, expected)
    written = sum(
        apply(plan(source, case.source_blocks, target, case.target_blocks, window), memory, actual)
        for window in data.draw(st.permutations(rectangles))
    )

    assert (actual == expected).all()
    assert np.max(written) <= 1
    assert np.sum(written) == once.length.sum()


def _canonical(model: Model, layer: int, head: int, position: int, plane: int) -> int:
    """What a byte of a cell holds, whichever rank has it."""
    return 1 + plane + 8 * (position + 64 * (head + 64 * layer))


def _cells(model: Model, layout: Layout, lists: BlockLists, end: int) -> list[tuple[int, int, int]]:
    """Begin, size and canonical content of every cell that the lists hold up to `end`."""
    cells = []
    for layer in layout.layers:
        size = layout.groups[layer.group].block_size
        blocks = lists[layer.group]
        number = int(layer.name.removeprefix("layers."))
        for index, plane in enumerate(layer.planes):
            for h in range(layer.heads):
                for i, block in enumerate(blocks.ids.tolist()):
                    for token in range(size):
                        position = blocks.start + i * size + token
                        if position >= end:
                            continue
                        begin = address(plane, block, h, token)
                        if layer.opaque:
                            begin += token * plane.cell_bytes
                        content = _canonical(model, number, layer.first_head + h, position, index)
                        cells.append((begin, plane.cell_bytes, content))
    return cells


@st.composite
def stages(draw: st.DrawFn, layers: int) -> list[range]:
    cuts = sorted({0, layers} | draw(st.sets(st.integers(0, layers), max_size=2)))
    return [range(a, b) for a, b in pairwise(cuts)]


@given(st.data())
def test_all_ranks_together_fill_every_rank_of_the_receiver_once(data: st.DataObject) -> None:
    case = data.draw(cases())
    model = case.model
    degrees = st.sampled_from([tp for tp in range(1, 9) if model.heads % tp == 0 or tp % model.heads == 0])
    sources = ranks(model, case.source, data.draw(degrees), data.draw(stages(model.layers)))
    targets = ranks(model, case.target, data.draw(degrees), data.draw(stages(model.layers)))
    held = {
        group: range(
            max(case.source_blocks[group].start, case.target_blocks[group].start),
            min(reach(sources[0], case.source_blocks[group]), reach(targets[0], case.target_blocks[group])),
        )
        for group in (0, 1)
    }
    memories = []
    for source in sources:
        memory = np.zeros(source.pool_bytes, np.int64)
        for begin, size, content in _cells(model, source, case.source_blocks, case.end):
            memory[begin : begin + size] = content
        memories.append(memory)

    for target in targets:
        check(target)
        covers(sources, target)
        memory = np.zeros(target.pool_bytes, np.int64)
        written = np.zeros(target.pool_bytes, np.int64)
        for source, full in zip(sources, memories, strict=True):
            if sends(source, target):
                assert shared_layers(source, target)
                window = Window(0, case.end, 0, len(source.layers))
                runs = plan(source, case.source_blocks, target, case.target_blocks, window)
                written += apply(runs, full, memory)
        for begin, size, content in _cells(model, target, case.target_blocks, case.end):
            group = model.group_of[(content - 1) // 8 // 64 // 64]
            if (content - 1) // 8 % 64 not in held[group]:
                continue
            assert (memory[begin : begin + size] == content).all()
            assert (written[begin : begin + size] == 1).all()
        assert written.max(initial=0) <= 1


@given(st.data())
def test_what_an_engine_would_register_passes_the_checks(data: st.DataObject) -> None:
    case = data.draw(cases())
    layout = rank(
        case.model, case.source, data.draw(spans(case.model.layers)), data.draw(spans(case.model.heads))
    )

    check(layout)
    check_blocks(layout, case.source_blocks)
