# SPDX-License-Identifier: Apache-2.0
"""Which bytes carry a handoff into a reservation.

`plan` is asked per write, by the mover. It cuts the window's positions into pieces that lie in one block on
either side, once per pair of groups, and multiplies them by the heads and planes of each layer. It expects
layouts that have passed `check`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from kvpushd.core.layout import BlockLists, Blocks, Layout, Window, block_size, reach, unit_bytes
from kvpushd.core.overlap import Overlap, check_mappable, overlaps
from kvpushd.core.runs import MAX_RUNS, Int64s, Runs, axis_of, bound, joined, product
from kvpushd.errors import Invalid, LayoutMismatch


def plan(
    source: Layout, source_blocks: BlockLists, target: Layout, target_blocks: BlockLists, window: Window
) -> Runs:
    """Byte runs that carry the positions both sides name from `source` into `target`, inside `window`.

    Sorted by source; adjacent runs merged. Positions that only one side names are left out. Where a layer
    is opaque a block moves whole, though the window may end inside of it; it may not start inside.

    Raises LayoutMismatch if a layer of the window can't be mapped, Invalid if the window is not one of
    these layouts or a list names a block that its pool does not have, OverLimit if it takes more than
    MAX_RUNS runs before the last merge.
    """
    if not 0 <= window.first_layer <= window.end_layer <= len(source.layers):
        raise Invalid(
            f"window of layers {window.first_layer} to {window.end_layer}, expected inside 0 to "
            f"{len(source.layers)}"
        )
    cuts: dict[tuple[int, int, bool], list[_Pieces]] = {}
    shapes: dict[_Shape, list[tuple[int, int]]] = defaultdict(list)
    for overlap in overlaps(source, target, window.first_layer, window.end_layer):
        check_mappable(source, overlap.source, target, overlap.target)
        groups = (overlap.source.group, overlap.target.group, overlap.source.opaque)
        if groups not in cuts:
            cuts[groups] = _cut(source, source_blocks, target, target_blocks, window, overlap)
        for mine, theirs in zip(overlap.source.planes, overlap.target.planes, strict=True):
            shape = _Shape(
                groups=groups,
                heads=overlap.heads,
                unit=unit_bytes(source, overlap.source, mine),
                source=(mine.block_stride, mine.head_stride, mine.token_stride),
                target=(theirs.block_stride, theirs.head_stride, theirs.token_stride),
            )
            shapes[shape].append(
                (
                    mine.offset + (overlap.first_head - overlap.source.first_head) * mine.head_stride,
                    theirs.offset + (overlap.first_head - overlap.target.first_head) * theirs.head_stride,
                )
            )
    parts: list[Runs] = []
    room = MAX_RUNS
    for shape, origins in shapes.items():
        for pieces in cuts[shape.groups]:
            parts.append(_expand(shape, pieces, np.array(sorted(origins), np.int64), room))
            room -= len(parts[-1].source)
    return joined(parts)


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
class _Shape:
    """What planes have in common whose runs differ by their origin only. Strides: block, head, token."""

    groups: tuple[int, int, bool]
    heads: int
    unit: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]

    @property
    def opaque(self) -> bool:
        return self.groups[2]


def _cut(
    source: Layout,
    source_blocks: BlockLists,
    target: Layout,
    target_blocks: BlockLists,
    window: Window,
    overlap: Overlap,
) -> list[_Pieces]:
    """The window's positions that both lists hold, as pieces."""
    mine = _list_of(source, source_blocks, overlap.source.group, "source")
    theirs = _list_of(target, target_blocks, overlap.target.group, "target")
    if mine is None or theirs is None:
        return []
    start = max(window.start, mine.start, theirs.start)
    end = min(window.end, reach(source, mine), reach(target, theirs))
    if start >= end:
        return []
    size, other_size = block_size(source, overlap.source), block_size(target, overlap.target)
    if overlap.source.opaque:
        for side, origin in (("source", mine.start), ("target", theirs.start)):
            if (start - origin) % size:
                raise LayoutMismatch(
                    f"layer {overlap.source.name!r} is opaque: the window begins at position {start}, "
                    f"inside a block of the {side}; a block of {size} positions moves as a whole"
                )
        end = start + -(-(end - start) // size) * size
    cuts = _boundaries(start, end, mine.start, size)
    if other_size != size or (theirs.start - mine.start) % size:
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
        ends = np.cumsum(counts)
        bound(int(ends[-1]), MAX_RUNS)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        parts.append((np.repeat(rest, counts) + within, 1))
    return [_pieces(at, tokens, mine, size, theirs, other_size) for at, tokens in parts]


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


def _expand(shape: _Shape, pieces: _Pieces, origins: Int64s, room: int) -> Runs:
    """The runs of all pieces, heads and planes of one shape."""
    block, head, token = shape.source
    other_block, other_head, other_token = shape.target
    heads = np.arange(shape.heads, dtype=np.int64)
    tokens = np.arange(1 if shape.opaque else pieces.tokens, dtype=np.int64)
    axes = [
        axis_of(origins[:, 0], origins[:, 1]),
        axis_of(heads * head, heads * other_head),
        axis_of(tokens * token, tokens * other_token),
        axis_of(
            pieces.source_block * block + pieces.source_token * token,
            pieces.target_block * other_block + pieces.target_token * other_token,
        ),
    ]
    return product(axes, shape.unit, room)
