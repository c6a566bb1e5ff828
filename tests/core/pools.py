# SPDX-License-Identifier: Apache-2.0
"""Builders of layouts, and memory in which every byte is told from every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpush_client.layout import Group, Layer, Layout, Plane
from kvpushd.core.layout import BlockLists, Blocks, Window
from kvpushd.core.runs import Runs

Memory = NDArray[np.int64]
"""One number per byte of a pool."""


@dataclass(frozen=True, slots=True)
class Model:
    """What both engines run. `group_of[n]` is the group of layer n."""

    group_of: tuple[int, ...]
    heads: int
    planes: tuple[int, ...] = (4,)
    opaque: bool = False

    @property
    def layers(self) -> int:
        return len(self.group_of)

    @property
    def cell(self) -> int:
        return sum(self.planes)


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine cuts its pools: `order` names the dimensions from the longest stride to the shortest.

    (L)ayer, (P)lane, (B)lock, (H)ead, toke(N). The planes' cells have the size of the largest.
    """

    groups: tuple[Group, ...]
    blocks: int = 8
    order: str = "LPBHN"
    padding: int = 0
    overlay: bool = False


def rank(
    model: Model,
    shape: Shape,
    layers: range | None = None,
    heads: range | None = None,
    replica: int = 0,
    replicas: int = 1,
) -> Layout:
    """One rank's layout: of these layers and heads, all of the model's if none are given."""
    layers = range(model.layers) if layers is None else layers
    heads = range(model.heads) if heads is None else heads
    size = max(group.block_size for group in shape.groups)
    # Where groups overlay one another, the n-th layer of each begins at the same byte.
    slots = []
    for n in layers:
        same = [m for m in layers if m < n and (not shape.overlay or model.group_of[m] == model.group_of[n])]
        slots.append(len(same))
    counts = {"L": max(slots) + 1, "P": len(model.planes), "B": shape.blocks, "H": len(heads)}
    unit = max(model.planes)
    if model.opaque:
        unit *= size
    else:
        counts["N"] = size
    strides = {"N": 0}
    for dimension in reversed([d for d in shape.order if d in counts]):
        strides[dimension] = unit
        unit = unit * counts[dimension] + shape.padding
    return Layout(
        pool_bytes=unit + shape.padding,
        blocks=shape.blocks,
        groups=shape.groups,
        layers=tuple(
            Layer(
                name=f"layers.{n}",
                group=model.group_of[n],
                first_head=heads.start,
                heads=len(heads),
                total_heads=model.heads,
                planes=tuple(
                    Plane(
                        shape.padding + slot * strides["L"] + p * strides["P"],
                        strides["B"],
                        strides["H"],
                        strides["N"],
                        cell,
                    )
                    for p, cell in enumerate(model.planes)
                ),
                opaque=model.opaque,
            )
            for n, slot in zip(layers, slots, strict=True)
        ),
        replica=replica,
        replicas=replicas,
    )


def ranks(model: Model, shape: Shape, tp: int = 1, stages: Sequence[range] | None = None) -> list[Layout]:
    """All ranks of an engine: each pipeline stage has `tp` ranks, that share or replicate the heads."""
    replicas = max(1, tp // model.heads)
    each = max(1, model.heads // tp)
    return [
        rank(
            model,
            shape,
            layers,
            range(r // replicas * each, r // replicas * each + each),
            r % replicas,
            replicas,
        )
        for layers in (stages or [range(model.layers)])
        for r in range(tp)
    ]


def listed(start: int, *ids: int, group: int = 0) -> Blocks:
    """A block list."""
    return Blocks(group, start, np.array(ids, np.int64))


def whole(layout: Layout, end: int, start: int = 0) -> Window:
    """A window of all layers."""
    return Window(start, end, 0, len(layout.layers))


def changed(layout: Layout, layer: int = 0, **fields: object) -> Layout:
    """The layout with fields of one layer replaced."""
    layers = list(layout.layers)
    layers[layer] = replace(layers[layer], **fields)  # type: ignore[arg-type]
    return replace(layout, layers=tuple(layers))


def address(plane: Plane, block: int, head: int, token: int) -> int:
    """Where a cell begins: the definition, on which all else is checked."""
    return plane.offset + block * plane.block_stride + head * plane.head_stride + token * plane.token_stride


def fresh(layout: Layout, sign: int) -> Memory:
    """Memory of which each byte is unlike any other, in this pool and in one of the other sign."""
    return sign * (np.arange(layout.pool_bytes, dtype=np.int64) + 1)


def apply(runs: Runs, source: Memory, target: Memory) -> NDArray[np.int64]:
    """Copy all runs; returns how often each byte of the target was written."""
    written = np.zeros(len(target), np.int64)
    for s, t, n in zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True):
        assert n > 0
        assert 0 <= s <= s + n <= len(source)
        assert 0 <= t <= t + n <= len(target)
        target[t : t + n] = source[s : s + n]
        written[t : t + n] += 1
    return written


def is_sorted_and_merged(runs: Runs) -> bool:
    """Sorted by source, and no run that the next one continues on both sides."""
    rows = list(zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True))
    return all(s < s2 and (s + n, t + n) != (s2, t2) for (s, t, n), (s2, t2, _) in pairwise(rows))


def copy_by_cell(
    source: Layout,
    source_blocks: BlockLists,
    memory: Memory,
    target: Layout,
    target_blocks: BlockLists,
    other: Memory,
    window: Window,
) -> int:
    """What a plan must do, cell by cell through addresses; returns how many bytes it copied."""
    theirs = {layer.name: layer for layer in target.layers}
    copied = 0
    for mine in source.layers[window.first_layer : window.end_layer]:
        if mine.name not in theirs:
            continue
        layer = theirs[mine.name]
        at = _places(source, source_blocks, mine)
        to = _places(target, target_blocks, layer)
        positions = [p for p in range(window.start, window.end) if p in at and p in to]
        if mine.opaque:
            positions = [p for p in positions if at[p][1] == 0]
        for plane, plane2 in zip(mine.planes, layer.planes, strict=True):
            n = plane.cell_bytes * (source.groups[mine.group].block_size if mine.opaque else 1)
            for head in range(mine.total_heads):
                h, h2 = head - mine.first_head, head - layer.first_head
                if not (0 <= h < mine.heads and 0 <= h2 < layer.heads):
                    continue
                for position in positions:
                    s = address(plane, at[position][0], h, at[position][1])
                    t = address(plane2, to[position][0], h2, to[position][1])
                    other[t : t + n] = memory[s : s + n]
                    copied += n
    return copied


def _places(layout: Layout, lists: BlockLists, layer: Layer) -> dict[int, tuple[int, int]]:
    """Block and token of every position that the lists hold for a layer."""
    size = layout.groups[layer.group].block_size
    return {
        blocks.start + i * size + token: (int(block), token)
        for blocks in lists
        if blocks.group == layer.group
        for i, block in enumerate(blocks.ids)
        for token in range(size)
    }
