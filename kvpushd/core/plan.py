# SPDX-License-Identifier: Apache-2.0
"""Which bytes carry a handoff into a reservation.

A mover has a `Planner` for each pair of pools and asks it per write. It cuts the window's positions into
pieces that lie in one block on either side, once per pair of groups, and multiplies them by the heads and
planes of each layer. It expects layouts that have passed `check`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvpushd.core.layout import BlockLists, Blocks, Layout, Plane, Window, block_size, reach, unit_bytes
from kvpushd.core.overlap import check_mappable, overlaps
from kvpushd.core.runs import (
    MAX_RUNS,
    Axis,
    Int64s,
    Runs,
    axis_of,
    bound,
    joined,
    numbered,
    order_of,
    product,
)
from kvpushd.errors import Invalid, LayoutMismatch

MAX_SPANS = 64
"""Ranges of layers that a planner keeps what it knows of; a sender goes through its layers in 16 groups."""
FEW_RUNS = 4096


class Planner:
    """Plans for one pair of layouts.

    What does not depend on the blocks is worked out once for each range of layers, of which a sender has few,
    and kept.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        self._source = source
        self._target = target
        self._spans: dict[tuple[int, int], list[_Shape]] = {}

    def plan(self, source_blocks: BlockLists, target_blocks: BlockLists, window: Window) -> Runs:
        """Byte runs that carry the positions both sides name from source to target, inside `window`.

        Sorted by source; adjacent runs merged. Positions that only one side names are left out. Where a layer
        is opaque a block moves whole, though the window may end inside of it; it may not start inside.

        Raises LayoutMismatch if a layer of the window can't be mapped, Invalid if the window is not one of
        these layouts or a list names a block that its pool does not have, OverLimit if it takes more than
        MAX_RUNS runs before the last merge.
        """
        cuts: dict[_Groups, list[_Pieces]] = {}
        parts: list[Runs] = []
        room = MAX_RUNS
        for shape in self._shapes(window.first_layer, window.end_layer):
            groups = shape.groups
            if groups not in cuts:
                cuts[groups] = _cut(self._source, source_blocks, self._target, target_blocks, window, groups)
            for pieces in cuts[groups]:
                parts.append(shape.expand(pieces, room))
                room -= len(parts[-1].source)
        return joined(parts)

    def _shapes(self, first_layer: int, end_layer: int) -> list[_Shape]:
        span = (first_layer, end_layer)
        if span not in self._spans:
            if not 0 <= first_layer <= end_layer <= len(self._source.layers):
                raise Invalid(
                    f"window of layers {first_layer} to {end_layer}, expected inside 0 to "
                    f"{len(self._source.layers)}"
                )
            shapes = list(_shapes(self._source, self._target, first_layer, end_layer))
            if len(self._spans) >= MAX_SPANS:
                self._spans.clear()
            self._spans[span] = shapes
        return self._spans[span]


def plan(
    source: Layout, source_blocks: BlockLists, target: Layout, target_blocks: BlockLists, window: Window
) -> Runs:
    """One plan of a Planner's, which see."""
    return Planner(source, target).plan(source_blocks, target_blocks, window)


def window_bytes(source: Layout, target: Layout, window: Window) -> int:
    """Bytes that `plan` moves for a window whose positions all have blocks on both sides.

    Costs time in proportion to the number of layers only.
    """
    total = 0
    for overlap in overlaps(source, target, window.first_layer, window.end_layer):
        start, end = window.start, window.end
        if overlap.source.opaque:
            size = block_size(source, overlap.source)
            start, end = start // size * size, -(-end // size) * size
        total += overlap.bytes_per_position * max(0, end - start)
    return total


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Positions cut so that each piece lies in one block on both sides, all of the same number of tokens.

    Arrays of one length: the block and the token in it at which a piece begins, on either side.
    """

    source_block: Int64s
    source_token: Int64s
    target_block: Int64s
    target_token: Int64s
    tokens: int


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a layer on either side, and whether its blocks move whole."""

    source: int
    target: int
    opaque: bool


class _Shape:
    """Planes whose runs differ by their origin only."""

    def __init__(
        self,
        groups: _Groups,
        heads: int,
        unit: int,
        strides: Sequence[_Strides],
        origins: list[tuple[int, int]],
    ) -> None:
        self.groups = groups
        self._unit = unit
        self._source, self._target = strides
        at = np.array(sorted(origins), np.int64)
        numbers = np.arange(heads, dtype=np.int64)
        self._planes = axis_of(at[:, 0], at[:, 1])
        self._heads = axis_of(numbers * self._source.head, numbers * self._target.head)
        self._inside: dict[int, tuple[list[Axis], Runs | None]] = {}

    def expand(self, pieces: _Pieces, room: int) -> Runs:
        """The runs of all pieces, heads and planes. Raises OverLimit if they are more than `room`."""
        mine, theirs = self._source, self._target
        source = pieces.source_block * mine.block + pieces.source_token * mine.token
        target = pieces.target_block * theirs.block + pieces.target_token * theirs.token
        axes, one = self._of(pieces.tokens)
        if one is None or len(source) * len(one.source) > FEW_RUNS:
            return product([*axes, axis_of(source, target)], self._unit, room)
        # So few cost the calls of numpy and little else: these are the fewest. `joined` puts them in order.
        bound(len(source) * len(one.source), room)
        return Runs(
            np.add.outer(one.source, source).ravel(),
            np.add.outer(one.target, target).ravel(),
            np.repeat(one.length, len(source)),
        )

    def _of(self, tokens: int) -> tuple[list[Axis], Runs | None]:
        """What all pieces of so many tokens have in common: axes, and, unless they are many, the runs of one.

        Pieces have as many tokens as the smaller block, or one.
        """
        if tokens not in self._inside:
            numbers = np.arange(1 if self.groups.opaque else tokens, dtype=np.int64)
            inner = axis_of(numbers * self._source.token, numbers * self._target.token)
            axes = [self._planes, self._heads, inner]
            few = math.prod(len(axis.source) for axis in axes) <= FEW_RUNS
            self._inside[tokens] = (axes, product(axes, self._unit, FEW_RUNS) if few else None)
        return self._inside[tokens]


@dataclass(frozen=True, slots=True)
class _Strides:
    """Bytes from one to the next."""

    block: int
    head: int
    token: int


def _shapes(source: Layout, target: Layout, first_layer: int, end_layer: int) -> Iterator[_Shape]:
    """What carries the layers that both have. Raises LayoutMismatch if one can't be mapped."""
    origins: dict[tuple[_Groups, int, int, _Strides, _Strides], list[tuple[int, int]]] = defaultdict(list)
    for overlap in overlaps(source, target, first_layer, end_layer):
        check_mappable(source, overlap.source, target, overlap.target)
        groups = _Groups(overlap.source.group, overlap.target.group, overlap.source.opaque)
        for mine, theirs in zip(overlap.source.planes, overlap.target.planes, strict=True):
            unit = unit_bytes(source, overlap.source, mine)
            origins[groups, overlap.heads, unit, _strides(mine), _strides(theirs)].append(
                (
                    mine.offset + (overlap.first_head - overlap.source.first_head) * mine.head_stride,
                    theirs.offset + (overlap.first_head - overlap.target.first_head) * theirs.head_stride,
                )
            )
    for (groups, heads, unit, *strides), at in origins.items():
        yield _Shape(groups, heads, unit, strides, at)


def _strides(plane: Plane) -> _Strides:
    return _Strides(plane.block_stride, plane.head_stride, plane.token_stride)


def _cut(
    source: Layout,
    source_blocks: BlockLists,
    target: Layout,
    target_blocks: BlockLists,
    window: Window,
    groups: _Groups,
) -> list[_Pieces]:
    """The window's positions that both lists hold, as pieces."""
    mine = _list_of(source, source_blocks, groups.source, "source")
    theirs = _list_of(target, target_blocks, groups.target, "target")
    if mine is None or theirs is None:
        return []
    start = max(window.start, mine.start, theirs.start)
    end = min(window.end, reach(source, mine), reach(target, theirs))
    if start >= end:
        return []
    size, other_size = source.groups[groups.source].block_size, target.groups[groups.target].block_size
    if groups.opaque:
        for side, origin in (("source", mine.start), ("target", theirs.start)):
            if (start - origin) % size:
                raise LayoutMismatch(
                    f"layers of group {groups.source} are opaque: the window begins at position {start}, "
                    f"inside a block of the {side}; a block of {size} positions moves as a whole"
                )
        end = start + -(-(end - start) // size) * size
    if other_size == size and (theirs.start - mine.start) % size == 0:
        return _in_step(start, end, mine, theirs, size)
    cuts = _boundaries(start, end, mine.start, size)
    cuts = np.union1d(cuts, _boundaries(start, end, theirs.start, other_size))
    lengths = np.diff(cuts, append=end)
    usual = min(size, other_size)
    whole = lengths == usual
    parts = []
    if whole.any():
        parts.append((cuts[whole], usual))
    rest, counts = cuts[~whole], lengths[~whole]
    if len(rest):
        # Few, unless the block sizes don't divide one another: token by token, and merged again later.
        bound(int(counts.sum()), MAX_RUNS)
        parts.append((np.repeat(rest, counts) + numbered(counts), 1))
    return [_pieces(at, tokens, mine, size, theirs, other_size) for at, tokens in parts]


def _in_step(start: int, end: int, mine: Blocks, theirs: Blocks, size: int) -> list[_Pieces]:
    """The same where both sides' blocks begin at the same positions, as nearly always: without a division for
    each of tens of thousands of blocks."""
    first = -(-(start - mine.start) // size)
    last = (end - mine.start) // size
    begin, stop = mine.start + first * size, mine.start + last * size
    parts = []
    if first < last:
        ids, other = mine.ids[first:last], theirs.ids[(begin - theirs.start) // size :][: last - first]
        if (ids[1:] < ids[:-1]).any():
            order = order_of(ids)
            ids, other = ids[order], other[order]
        nothing = np.zeros(last - first, np.int64)
        parts.append(_Pieces(ids, nothing, other, nothing, size))
    rest = np.concatenate([np.arange(start, min(begin, end)), np.arange(max(begin, stop), end)])
    if len(rest):
        parts.append(_pieces(rest, 1, mine, size, theirs, size))
    return parts


def _pieces(at: Int64s, tokens: int, mine: Blocks, size: int, theirs: Blocks, other_size: int) -> _Pieces:
    index, token = np.divmod(at - mine.start, size)
    other_index, other_token = np.divmod(at - theirs.start, other_size)
    return _Pieces(mine.ids[index], token, theirs.ids[other_index], other_token, tokens)


def _boundaries(start: int, end: int, origin: int, size: int) -> Int64s:
    """`start`, and every multiple of `size` from `origin` between it and `end`."""
    first = start + size - (start - origin) % size
    return np.concatenate([[start], np.arange(first, end, size, dtype=np.int64)])


def _list_of(layout: Layout, lists: BlockLists, group: int, side: str) -> Blocks | None:
    found = [blocks for blocks in lists if blocks.group == group]
    if len(found) > 1:
        raise Invalid(f"{side}: blocks of group {group} are listed twice: name each group once")
    if not found or not len(found[0].ids):
        return None
    ids = found[0].ids
    if ids.min() < 0 or ids.max() >= layout.blocks:
        raise Invalid(
            f"{side}: blocks of group {group} are {ids.min()} to {ids.max()}, expected "
            f"0 to {layout.blocks - 1}"
        )
    return found[0]
