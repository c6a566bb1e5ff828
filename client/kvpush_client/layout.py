# SPDX-License-Identifier: Apache-2.0
"""How an engine describes its pool: plain values that mirror `kvpush.v1.Layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """How the blocks of an attention group relate to positions."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """An attention group: layers that share a block list."""

    block_size: int
    kind: GroupKind = GroupKind.FULL


@dataclass(frozen=True, slots=True)
class Plane:
    """One strided array of cells: K, V, or both together. Bytes.

    The cell of (block b, local head h, token t) begins at
    `offset + b * block_stride + h * head_stride + t * token_stride` from the pool's start.
    """

    offset: int
    block_stride: int
    head_stride: int
    token_stride: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer of a rank. Where `opaque`, a (block, head) moves only as a whole."""

    name: str
    group: int
    first_head: int
    heads: int
    total_heads: int
    planes: tuple[Plane, ...]
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's pool, its layers in the order in which the forward pass finishes them."""

    pool_bytes: int
    blocks: int
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one group: `ids[i]` holds positions from `start + i * block_size`."""

    group: int
    start: int
    ids: Sequence[int]

    def frozen(self) -> Blocks:
        """A copy that does not change with the caller's list."""
        return Blocks(self.group, self.start, tuple(self.ids))
