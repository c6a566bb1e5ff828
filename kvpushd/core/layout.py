# SPDX-License-Identifier: Apache-2.0
"""How a pool is cut, and which blocks hold which positions.

A layout gives, for one rank, the address of every (layer, block, head, token) of its pool. Two ranks'
layouts and block lists are all that `plan` needs to say which bytes go where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


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
    """One strided array of cells: K, V, or both together. All in bytes.

    The cell of (block b, local head h, token t) begins at
    `offset + b * block_stride + h * head_stride + t * token_stride` and is `cell_bytes` long.
    """

    offset: int
    block_stride: int
    head_stride: int
    token_stride: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer of a rank. Two sides' layers are matched by `name`.

    Where `opaque`, only the backend knows how the inside of a (block, head) is packed: the unit of
    `block_size * cell_bytes` bytes at (block, head) moves as a whole, or not at all.
    """

    name: str
    group: int
    first_head: int
    heads: int
    total_heads: int
    planes: tuple[Plane, ...]
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's pool: `blocks` blocks (ids 0 to blocks - 1) cut into `layers`, in forward order.

    Of `replicas` ranks that hold the same heads of the same layers this one is number `replica`.
    """

    pool_bytes: int
    blocks: int
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    replica: int = 0
    replicas: int = 1


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
