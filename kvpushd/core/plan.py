# SPDX-License-Identifier: Apache-2.0
"""Which bytes carry a handoff into a reservation.

A transfer between two ranks is the intersection of two boxes over (layers x heads x positions). Layers
are matched by name, heads by their number in the model, positions by the token that they stand for; so
unequal TP, replicated heads, PP, unequal block sizes and a receiver with a prefix are all one case.

`mappable`, `covers` and `sends` are asked once per pair of ranks, at the handshake. `plan` is asked per
write, by the mover; the others are what a schedule needs to know beforehand. All expect layouts that
have passed `check`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpushd.core.layout import BlockLists, Blocks, GroupKind, Layer, Layout, Window, reach, unit_bytes
from kvpushd.errors import Invalid, LayoutMismatch, OverLimit

Int64s = NDArray[np.int64]

# A layout of single bytes in two orders would take the mover's memory: 24 bytes of plan per byte moved.
MAX_RUNS = 1 << 24


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs of equal length on both sides: three int64 arrays of one length."""

    source: Int64s
    target: Int64s
    length: Int64s


def mappable(source: Layout, target: Layout) -> None:
    """Return if every layer that both ranks have can be carried from `source` into `target`.

    A layer that only one of them has is no matter: with PP each rank has its own.

    Raises LayoutMismatch, naming the layer, the field and both values.
    """
    theirs = {layer.name: layer for layer in target.layers}
    for layer in source.layers:
        if layer.name in theirs:
            _mappable(source, layer, target, theirs[layer.name])


def covers(sources: Sequence[Layout], target: Layout) -> None:
    """Return if every (layer, head) of `target` is served by exactly one of `sources`.

    `sources` are all ranks of the sending engine.

    Raises LayoutMismatch, naming the layer and the heads that no rank, or more than one, would send.
    """
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for source in sources:
        if _serves(source, target):
            for layer in source.layers:
                held[layer.name].append((layer.first_head, layer.first_head + layer.heads))
    for layer in target.layers:
        reached = layer.first_head
        end = layer.first_head + layer.heads
        for low, high in sorted(held[layer.name]):
            low, high = max(low, layer.first_head), min(high, end)
            if low >= high:
                continue
            if low > reached:
                break
            if low < reached:
                raise LayoutMismatch(
                    f"layer {layer.name!r}: head {low} would be sent by more than one rank of the sending "
                    "engine: ranks that hold the same heads must say which replica of how many they are"
                )
            reached = high
        if reached < end:
            raise LayoutMismatch(
                f"layer {layer.name!r}: the receiver has heads {layer.first_head} to {end - 1}, but no rank "
                f"of the sending engine sends head {reached}: both engines must run the same model, and all "
                "ranks of the sender must be registered"
            )


def sends(source: Layout, target: Layout) -> bool:
    """Whether this rank of the sending engine is one that writes to this rank of the receiving one.

    They have heads of a layer in common, and of the sender's replicas of those heads it is this one's turn:
    each receiving rank is served by one replica, and replicated receivers by different ones.
    """
    return _serves(source, target) and next(_pairs(source, target), None) is not None


def shared_layers(source: Layout, target: Layout) -> tuple[int, ...]:
    """Indices into `source.layers` of the layers of which `target` has some of the same heads; ascending."""
    return tuple(pair.index for pair in _pairs(source, target))


def granularity(source: Layout, target: Layout) -> int:
    """Positions that a window's start must be a multiple of: 1, or the block size where a layer is opaque."""
    return math.lcm(
        *(_block_size(source, pair.source) for pair in _pairs(source, target) if pair.source.opaque)
    )


def bytes_per_position(source: Layout, target: Layout) -> Int64s:
    """Bytes that one position takes to move, for each of `source.layers`; 0 where it is not shared."""
    sizes = np.zeros(len(source.layers), np.int64)
    for pair in _pairs(source, target):
        sizes[pair.index] = pair.heads * sum(plane.cell_bytes for plane in pair.source.planes)
    return sizes


def window_bytes(source: Layout, target: Layout, window: Window) -> int:
    """Bytes that `plan` moves for a window whose positions all have blocks on both sides.

    Costs time in proportion to the number of layers only.
    """
    total = 0
    for pair in _pairs(source, target, window.first_layer, window.end_layer):
        cell = pair.heads * sum(plane.cell_bytes for plane in pair.source.planes)
        start, end = window.start, window.end
        if pair.source.opaque:
            size = _block_size(source, pair.source)
            start, end = start // size * size, -(-end // size) * size
        total += cell * max(0, end - start)
    return total


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
    for pair in _pairs(source, target, window.first_layer, window.end_layer):
        _mappable(source, pair.source, target, pair.target)
        groups = (pair.source.group, pair.target.group, pair.source.opaque)
        if groups not in cuts:
            cuts[groups] = _cut(source, source_blocks, target, target_blocks, window, pair)
        for mine, theirs in zip(pair.source.planes, pair.target.planes, strict=True):
            shape = _Shape(
                groups=groups,
                heads=pair.heads,
                unit=unit_bytes(source, pair.source, mine),
                source=(mine.block_stride, mine.head_stride, mine.token_stride),
                target=(theirs.block_stride, theirs.head_stride, theirs.token_stride),
            )
            shapes[shape].append(
                (
                    mine.offset + (pair.first_head - pair.source.first_head) * mine.head_stride,
                    theirs.offset + (pair.first_head - pair.target.first_head) * theirs.head_stride,
                )
            )
    parts: list[Runs] = []
    room = MAX_RUNS
    for shape, origins in shapes.items():
        for pieces in cuts[shape.groups]:
            parts.append(_expand(shape, pieces, np.array(sorted(origins), np.int64), room))
            room -= len(parts[-1].source)
    return _merged(parts)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A layer that both ranks have, and the heads of it that both have, by their number in the model."""

    index: int
    source: Layer
    target: Layer
    first_head: int
    end_head: int

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head


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


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of the runs: what its indices add to either side's offset, ascending on the source.

    `length` counts how many units each index stands for.
    """

    source: Int64s
    target: Int64s
    length: Int64s

    @property
    def step(self) -> int:
        """Smallest distance between two indices on the source; 0 where there is one index only."""
        return int(np.diff(self.source).min()) if len(self.source) > 1 else 0

    def merged(self, unit: int) -> _Axis:
        """The axis with indices joined whose pieces of `unit` bytes touch on both sides."""
        firsts = _firsts(self.source, self.target, unit)
        return _Axis(
            self.source[firsts],
            self.target[firsts],
            np.diff(firsts, append=len(self.source)).astype(np.int64),
        )


def _serves(source: Layout, target: Layout) -> bool:
    return target.replica % source.replicas == source.replica


def _block_size(layout: Layout, layer: Layer) -> int:
    return layout.groups[layer.group].block_size


def _pairs(source: Layout, target: Layout, first: int = 0, end: int | None = None) -> Iterator[_Pair]:
    theirs = {layer.name: layer for layer in target.layers}
    for index, mine in enumerate(source.layers[first:end], first):
        other = theirs.get(mine.name)
        if other is None:
            continue
        low = max(mine.first_head, other.first_head)
        high = min(mine.first_head + mine.heads, other.first_head + other.heads)
        if low < high:
            yield _Pair(index, mine, other, low, high)


def _mappable(source: Layout, mine: Layer, target: Layout, theirs: Layer) -> None:
    def same(field: str, sender: object, receiver: object) -> None:
        if sender != receiver:
            raise LayoutMismatch(
                f"layer {mine.name!r}: {field} is {sender} at the sender and {receiver} at the receiver: "
                "start both engines with the same model, KV dtype and attention backend"
            )

    here, there = source.groups[mine.group], target.groups[theirs.group]
    same("kind of group", here.kind.value, there.kind.value)
    if here.kind is GroupKind.STATE:
        raise LayoutMismatch(
            f"layer {mine.name!r}: kind of group is {here.kind.value} on both sides: a state is not kept by "
            "position and can't be transferred; run this model without a KV transfer"
        )
    same("total_heads", mine.total_heads, theirs.total_heads)
    same("number of planes", len(mine.planes), len(theirs.planes))
    for index, (plane, other) in enumerate(zip(mine.planes, theirs.planes, strict=True)):
        same(f"planes[{index}].cell_bytes", plane.cell_bytes, other.cell_bytes)
    same("opaque", mine.opaque, theirs.opaque)
    if mine.opaque:
        same("block_size (of an opaque layer)", here.block_size, there.block_size)


def _cut(
    source: Layout,
    source_blocks: BlockLists,
    target: Layout,
    target_blocks: BlockLists,
    window: Window,
    pair: _Pair,
) -> list[_Pieces]:
    """The window's positions that both lists hold, as pieces."""
    mine = _list_of(source, source_blocks, pair.source.group, "source")
    theirs = _list_of(target, target_blocks, pair.target.group, "target")
    if mine is None or theirs is None:
        return []
    start = max(window.start, mine.start, theirs.start)
    end = min(window.end, reach(source, mine), reach(target, theirs))
    if start >= end:
        return []
    size, other_size = _block_size(source, pair.source), _block_size(target, pair.target)
    if pair.source.opaque:
        for side, origin in (("source", mine.start), ("target", theirs.start)):
            if (start - origin) % size:
                raise LayoutMismatch(
                    f"layer {pair.source.name!r} is opaque: the window begins at position {start}, inside a "
                    f"block of the {side}; a block of {size} positions moves as a whole"
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
        _bound(int(ends[-1]), MAX_RUNS)
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
    """The runs of all pieces, heads and planes of one shape. Merges before it multiplies, where it can."""
    block, head, token = shape.source
    other_block, other_head, other_token = shape.target
    heads = np.arange(shape.heads, dtype=np.int64)
    tokens = np.arange(1 if shape.opaque else pieces.tokens, dtype=np.int64)
    axes = [
        _axis(origins[:, 0], origins[:, 1]),
        _axis(heads * head, heads * other_head),
        _axis(tokens * token, tokens * other_token),
        _axis(
            pieces.source_block * block + pieces.source_token * token,
            pieces.target_block * other_block + pieces.target_token * other_token,
        ),
    ]
    axes.sort(key=lambda axis: axis.step)
    unit = shape.unit
    inner: list[_Axis] = []
    while axes:
        axis = axes.pop(0).merged(unit)
        inner.append(axis)
        if len(axis.source) > 1:
            break
        # All of it is one run on both sides: the next axis counts in those.
        unit *= int(axis.length[0])
    _bound(math.prod(len(axis.source) for axis in inner + axes), room)
    source = target = np.zeros(1, np.int64)
    length = np.full(1, shape.unit, np.int64)
    # The axis with the longest step outermost: so the runs come out in the source's order, if one exists.
    for axis in sorted(inner + axes, key=lambda axis: axis.step, reverse=True):
        source = np.add.outer(source, axis.source).ravel()
        target = np.add.outer(target, axis.target).ravel()
        length = np.multiply.outer(length, axis.length).ravel()
    return Runs(source, target, length)


def _bound(runs: int, room: int) -> None:
    if runs > room:
        raise OverLimit(
            f"one write of more than {MAX_RUNS:,} runs: move fewer positions or layers at a time, or give "
            "both engines the same block size and the same order of heads and tokens"
        )


def _axis(source: Int64s, target: Int64s) -> _Axis:
    if (source[1:] < source[:-1]).any():
        order = np.argsort(source)
        source, target = source[order], target[order]
    return _Axis(source, target, np.ones(len(source), np.int64))


def _merged(parts: Sequence[Runs]) -> Runs:
    """All parts as one, sorted by source, runs that touch on both sides made one."""
    if not parts:
        return Runs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    source = np.concatenate([part.source for part in parts])
    target = np.concatenate([part.target for part in parts])
    length = np.concatenate([part.length for part in parts])
    if (source[1:] < source[:-1]).any():
        order = np.argsort(source, kind="stable")
        source, target, length = source[order], target[order], length[order]
    firsts = _firsts(source, target, length)
    if len(firsts) < len(source):
        source, target, length = source[firsts], target[firsts], np.add.reduceat(length, firsts)
    return Runs(source, target, length)


def _firsts(source: Int64s, target: Int64s, length: Int64s | int) -> NDArray[np.intp]:
    """Indices of the runs that don't continue the one before them on both sides."""
    apart = np.ones(len(source), np.bool_)
    before = length if isinstance(length, int) else length[:-1]
    apart[1:] = (source[1:] - source[:-1] != before) | (target[1:] - target[:-1] != before)
    return np.flatnonzero(apart)
