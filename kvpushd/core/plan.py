# SPDX-License-Identifier: Apache-2.0
"""Which bytes carry a handoff into a reservation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpushd.core.layout import BlockLists, Layout, Window


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs of equal length on both sides: three int64 arrays of one length."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    length: NDArray[np.int64]


def plan(
    source: Layout, source_blocks: BlockLists, target: Layout, target_blocks: BlockLists, window: Window
) -> Runs:
    """Byte runs that carry the positions both sides name from `source` into `target`, inside `window`.

    Sorted by source; adjacent runs merged. Positions that only one side names are left out.
    """
    raise NotImplementedError
