# SPDX-License-Identifier: Apache-2.0
"""How a pool is cut, and which blocks hold which positions.

A layout gives, for one rank, the address of every (layer, block, head, token) of its pool. Two ranks'
layouts and block lists are all that `plan` needs to say which bytes go where. The layout's own types are
the client's: an engine describes its pool in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kvpush_client.layout import Group, GroupKind, Layer, Layout, Plane
from numpy.typing import NDArray


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

__all__ = ["BlockLists", "Blocks", "Group", "GroupKind", "Layer", "Layout", "Plane", "Window"]
