# SPDX-License-Identifier: Apache-2.0
"""What two ranks have in common, and whether it can move.

A transfer between two ranks is the intersection of two boxes over (layers x heads x positions). Layers
are matched by name, heads by their number in the model, positions by the token that they stand for; so
unequal TP, replicated heads, PP, unequal block sizes and a receiver with a prefix are all one case.

`mappable`, `covers` and `sends` are asked once per pair of ranks, at the handshake; the others are what a
schedule and a plan need to know of a pair. All expect layouts that have passed `check`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpushd.core.layout import GroupKind, Layer, Layout, block_size
from kvpushd.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Overlap:
    """A layer that both ranks have, and the heads of it that both have, by their number in the model."""

    index: int
    source: Layer
    target: Layer
    first_head: int
    end_head: int

    @property
    def heads(self) -> int:
        """How many heads both have."""
        return self.end_head - self.first_head

    @property
    def bytes_per_position(self) -> int:
        """Bytes that one position takes to move, in this layer."""
        return self.heads * sum(plane.cell_bytes for plane in self.source.planes)


def overlaps(source: Layout, target: Layout, first: int = 0, end: int | None = None) -> Iterator[Overlap]:
    """What both have of `source.layers[first:end]`, in that order."""
    theirs = {layer.name: layer for layer in target.layers}
    for index, mine in enumerate(source.layers[first:end], first):
        other = theirs.get(mine.name)
        if other is None:
            continue
        low = max(mine.first_head, other.first_head)
        high = min(mine.first_head + mine.heads, other.first_head + other.heads)
        if low < high:
            yield Overlap(index, mine, other, low, high)


def mappable(source: Layout, target: Layout) -> None:
    """Return if every layer that both ranks have can be carried from `source` into `target`.

    A layer that only one of them has is no matter: with PP each rank has its own.

    Raises LayoutMismatch, naming the layer, the field and both values.
    """
    theirs = {layer.name: layer for layer in target.layers}
    for layer in source.layers:
        if layer.name in theirs:
            check_mappable(source, layer, target, theirs[layer.name])


def check_mappable(source: Layout, mine: Layer, target: Layout, theirs: Layer) -> None:
    """Return if a layer of `source` can be carried into the one of the same name in `target`.

    Raises LayoutMismatch, naming the layer, the field and both values.
    """

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
    return _serves(source, target) and next(overlaps(source, target), None) is not None


def shared_layers(source: Layout, target: Layout) -> tuple[int, ...]:
    """Indices into `source.layers` of the layers of which `target` has some of the same heads; ascending."""
    return tuple(overlap.index for overlap in overlaps(source, target))


def shared_groups(source: Layout, target: Layout) -> dict[int, frozenset[int]]:
    """The groups of `source` that those layers are of, and the groups of `target` for each; ascending."""
    found: dict[int, set[int]] = {}
    for each in overlaps(source, target):
        found.setdefault(each.source.group, set()).add(each.target.group)
    return {group: frozenset(found[group]) for group in sorted(found)}


def granularity(source: Layout, target: Layout) -> int:
    """Positions that a window's start must be a multiple of: 1, or the block size where a layer is opaque."""
    return math.lcm(
        *(block_size(source, each.source) for each in overlaps(source, target) if each.source.opaque)
    )


def whole(source: Layout, target: Layout) -> int:
    """Positions at whose multiples a window's end splits no block, of either side."""
    return math.lcm(
        *(
            size
            for each in overlaps(source, target)
            for size in (block_size(source, each.source), block_size(target, each.target))
        )
    )


def bytes_per_position(source: Layout, target: Layout) -> NDArray[np.int64]:
    """Bytes that one position takes to move, for each of `source.layers`; 0 where it is not shared."""
    sizes = np.zeros(len(source.layers), np.int64)
    for overlap in overlaps(source, target):
        sizes[overlap.index] = overlap.bytes_per_position
    return sizes


def _serves(source: Layout, target: Layout) -> bool:
    return target.replica % source.replicas == source.replica
