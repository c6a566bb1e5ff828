# SPDX-License-Identifier: Apache-2.0
"""How a pool is cut, and which blocks hold which positions.

A layout gives, for one rank, the address of every (layer, block, head, token) of its pool. Two ranks'
layouts and block lists are all that `plan` needs to say which bytes go where. The layout's own types are
the client's: an engine describes its pool in them.

Layouts and block lists come from engines and peers, so nothing is computed from them before `check` and
`check_blocks` have passed: afterwards every address that they can name lies inside the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpush_client.layout import Group, GroupKind, Layer, Layout, Plane
from kvpushd.errors import Invalid

# Far beyond any engine, and small enough that no product or sum of what they bound leaves an int64.
MAX_POOL_BYTES = 1 << 48
MAX_BLOCKS = 1 << 31
MAX_POSITION = (1 << 31) - 1
MAX_BLOCK_SIZE = 1 << 16
MAX_CELL_BYTES = 1 << 24
MAX_HEADS = 1 << 16
MAX_REPLICAS = 1 << 16
MAX_GROUPS = 64
MAX_LAYERS = 4096
MAX_PLANES = 8
MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one group of a half: `ids[i]` holds positions from `start + i * block_size`."""

    group: int
    start: int
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """A rectangle of a transfer: positions [start, end) of layers [first_layer, end_layer).

    Layers count in the sender's order (`Layout.layers` of the sending rank).
    """

    start: int
    end: int
    first_layer: int
    end_layer: int


BlockLists = Sequence[Blocks]


def unit_bytes(layout: Layout, layer: Layer, plane: Plane) -> int:
    """What moves as one piece: bytes of a cell, or of a whole (block, head) where the layer is opaque."""
    return plane.cell_bytes * block_size(layout, layer) if layer.opaque else plane.cell_bytes


def block_size(layout: Layout, layer: Layer) -> int:
    """Positions that one block of a layer holds."""
    return layout.groups[layer.group].block_size


def bytes_per_position(layout: Layout) -> Counter[int]:
    """Bytes that a position takes in the layers that keep all of them, i.e. not in sliding windows: by how
    many positions move as one piece, a block of them where a layer is opaque, else one."""
    found: Counter[int] = Counter()
    for layer in layout.layers:
        if layout.groups[layer.group].kind is GroupKind.FULL:
            piece = block_size(layout, layer) if layer.opaque else 1
            found[piece] += layer.heads * sum(plane.cell_bytes for plane in layer.planes)
    return found


def check(layout: Layout) -> None:
    """Return if every (layer, block, head, token) has an address inside the pool, and one of its own.

    Layers may overlay one another (groups of a hybrid model do); the cells of one layer may not. Costs
    time in proportion to the number of layers, whatever their values are.

    Raises Invalid, naming the field, what it was and what was expected.
    """
    _within("pool_bytes", layout.pool_bytes, 1, MAX_POOL_BYTES)
    _within("blocks", layout.blocks, 1, MAX_BLOCKS)
    _within("replicas", layout.replicas, 1, MAX_REPLICAS)
    _within("replica", layout.replica, 0, layout.replicas - 1)
    _within("number of groups", len(layout.groups), 1, MAX_GROUPS)
    _within("number of layers", len(layout.layers), 1, MAX_LAYERS)
    for index, group in enumerate(layout.groups):
        _within(f"groups[{index}].block_size", group.block_size, 1, MAX_BLOCK_SIZE)
    names: set[str] = set()
    for index, layer in enumerate(layout.layers):
        _within(f"layers[{index}]: length of name", len(layer.name), 1, MAX_NAME)
        if layer.name in names:
            raise Invalid(f"two layers are named {layer.name!r}: the two sides are matched by the names")
        names.add(layer.name)
        _check_layer(layout, layer)


def check_blocks(layout: Layout, blocks: BlockLists, start: int = 0, end: int | None = None) -> None:
    """Return if the lists name blocks that the pool has, each at most once, at positions that fit.

    With `end`, the lists must also hold what positions [start, end) need of every group that has layers
    in this pool: a full group all of them, a sliding window the last one. (A list may hold more; of a
    window all that it holds from `start` on must then come.)

    Raises Invalid, naming the group, what was wrong and what was expected.
    """
    by_group: dict[int, Blocks] = {}
    for listed in blocks:
        _within("group of a block list", listed.group, 0, len(layout.groups) - 1)
        where = f"blocks of group {listed.group}"
        if listed.group in by_group:
            raise Invalid(f"{where} are listed twice: name each group once")
        by_group[listed.group] = listed
        _check_list(layout, listed, where)
    if end is None:
        return
    _within("end", end, 1, MAX_POSITION)
    _within("start", start, 0, end - 1)
    for index in sorted({layer.group for layer in layout.layers}):
        _check_reach(layout.groups[index], by_group.get(index), index, start, end)


def reach(layout: Layout, blocks: Blocks) -> int:
    """One past the last position that `blocks` hold."""
    return blocks.start + len(blocks.ids) * layout.groups[blocks.group].block_size


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Invalid(f"{field} is {value}, expected {low} to {high}")


def _check_layer(layout: Layout, layer: Layer) -> None:
    where = f"layer {layer.name!r}"
    _within(f"{where}: group", layer.group, 0, len(layout.groups) - 1)
    _within(f"{where}: total_heads", layer.total_heads, 1, MAX_HEADS)
    _within(f"{where}: heads", layer.heads, 1, layer.total_heads)
    _within(f"{where}: first_head", layer.first_head, 0, layer.total_heads - layer.heads)
    _within(f"{where}: number of planes", len(layer.planes), 1, MAX_PLANES)
    shapes: list[_Shape] = []
    for index, plane in enumerate(layer.planes):
        field = f"{where}: planes[{index}]"
        _within(f"{field}.cell_bytes", plane.cell_bytes, 1, MAX_CELL_BYTES)
        _within(f"{field}.offset", plane.offset, 0, layout.pool_bytes - 1)
        for name in ("block_stride", "head_stride", "token_stride"):
            _within(f"{field}.{name}", getattr(plane, name), 0, layout.pool_bytes)
        shape = _Shape.of(layout, layer, plane)
        if plane.offset + shape.extent > layout.pool_bytes:
            raise Invalid(
                f"{field} ends at byte {plane.offset + shape.extent:,} but the pool has "
                f"{layout.pool_bytes:,}: register the layout of the tensors that lie in this pool"
            )
        if not shape.nests():
            raise Invalid(
                f"{field}: cells overlap: strides of block, head and token ({plane.block_stride}, "
                f"{plane.head_stride}, {plane.token_stride}) must nest around {shape.unit} bytes"
            )
        for other, before in enumerate(shapes):
            if not shape.clear_of(before):
                raise Invalid(f"{field} overlaps planes[{other}]: cells of one layer can't share bytes")
        shapes.append(shape)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A plane as a strided array: `dims` are (stride, count) by dimension, those of count 1 left out."""

    offset: int
    unit: int
    dims: frozenset[tuple[str, int, int]]

    @classmethod
    def of(cls, layout: Layout, layer: Layer, plane: Plane) -> _Shape:
        tokens = 1 if layer.opaque else layout.groups[layer.group].block_size
        dims = (
            ("block", plane.block_stride, layout.blocks),
            ("head", plane.head_stride, layer.heads),
            ("token", plane.token_stride, tokens),
        )
        return cls(
            plane.offset, unit_bytes(layout, layer, plane), frozenset(dim for dim in dims if dim[2] > 1)
        )

    @property
    def extent(self) -> int:
        """Bytes from the first cell's begin to the last cell's end."""
        return self.unit + sum(stride * (count - 1) for _, stride, count in self.dims)

    def nests(self) -> bool:
        """Sufficient for no two cells to overlap, and true of every transposed contiguous array."""
        return _nest(self.unit, ((stride, count) for _, stride, count in self.dims))

    def clear_of(self, other: _Shape) -> bool:
        """Whether no cell of one overlaps a cell of the other: apart, or interleaved regularly."""
        low, high = sorted((self, other), key=lambda shape: shape.offset)
        apart = high.offset - low.offset
        if apart >= low.extent:
            return True
        # Interleaved: what both repeat alike is set aside; what each does inside of that must be apart.
        common = low.dims & high.dims
        inner_low, inner_high = (
            _Shape(shape.offset, shape.unit, shape.dims - common).extent for shape in (low, high)
        )
        # A common dimension inside the step from one plane to the other widens both.
        for _, stride, count in sorted(common, key=lambda dim: dim[1]):
            if stride < apart:
                inner_low += stride * (count - 1)
                inner_high += stride * (count - 1)
        outer = ((stride, count) for _, stride, count in common if stride >= apart)
        return apart >= inner_low and _nest(apart + inner_high, outer)


def _nest(unit: int, dims: Iterable[tuple[int, int]]) -> bool:
    for stride, count in sorted(dims):
        if stride < unit:
            return False
        unit += stride * (count - 1)
    return True


def _check_list(layout: Layout, listed: Blocks, where: str) -> None:
    size = layout.groups[listed.group].block_size
    _within(f"{where}: number of blocks", len(listed.ids), 0, layout.blocks)
    _within(f"{where}: start", listed.start, 0, MAX_POSITION)
    if listed.start % size:
        raise Invalid(
            f"{where} start at position {listed.start}, expected a multiple of the block size {size}"
        )
    _within(f"{where}: one past the last position", reach(layout, listed), 0, MAX_POSITION)
    if len(listed.ids) == 0:
        return
    if len(listed.ids) == 1:  # numpy takes 20 us for so little
        _within(f"{where}: block id", int(listed.ids[0]), 0, layout.blocks - 1)
        return
    ids = np.sort(listed.ids)
    _within(f"{where}: lowest block id", int(ids[0]), 0, layout.blocks - 1)
    _within(f"{where}: highest block id", int(ids[-1]), 0, layout.blocks - 1)
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        raise Invalid(f"{where} name block {int(ids[twice[0]])} twice: a block holds one range of positions")


def _check_reach(group: Group, listed: Blocks | None, index: int, start: int, end: int) -> None:
    if group.kind is GroupKind.STATE:
        return
    where = f"blocks of group {index}"
    if listed is None or len(listed.ids) == 0:
        raise Invalid(f"{where} are missing: positions {start} to {end} need them")
    if group.kind is GroupKind.FULL and listed.start > start:
        raise Invalid(f"{where} start at position {listed.start}, expected {start} or before")
    if listed.start >= end:
        raise Invalid(f"{where} start at position {listed.start}, expected before {end}")
    last = listed.start + len(listed.ids) * group.block_size
    if last < end:
        raise Invalid(f"{where} hold positions up to {last}, expected {end} or more: name all blocks")


__all__ = [
    "BlockLists",
    "Blocks",
    "Group",
    "GroupKind",
    "Layer",
    "Layout",
    "Plane",
    "Window",
    "check",
    "check_blocks",
    "reach",
    "unit_bytes",
]
