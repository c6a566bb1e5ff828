# SPDX-License-Identifier: Apache-2.0
"""A write as what is begun of it at a time."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvpushd.core.runs import Runs, numbered
from kvpushd.mover.transport.parcel import SHORT_BYTES, parcels_of

PART_RUNS = 2048
"""Runs under way at a time to one outlet."""
PIECE_BYTES = 1 << 20
"""Longer runs are cut: over loopback TCP one put of 32 MiB took 1.5 times as long as 32 of 1 MiB."""


def _pieces(runs: Runs) -> Runs:
    """The same bytes in runs of at most PIECE_BYTES."""
    counts = -(-runs.length // PIECE_BYTES)
    if not len(counts) or counts.max() <= 1:
        return runs
    whole = np.repeat(np.arange(len(counts)), counts)
    offset = numbered(counts) * PIECE_BYTES
    length = np.minimum(runs.length[whole] - offset, PIECE_BYTES)
    return Runs(runs.source[whole] + offset, runs.target[whole] + offset, length)


def parts_of(runs: Runs, packs: bool) -> tuple[deque[Runs], deque[Runs]]:
    """Cuts a write into what is under way at a time: runs as they are and, with `packs`, parcels."""
    if packs:
        short = runs.length < SHORT_BYTES
        return _plain(runs.pick(~short)), parcels_of(runs.pick(short))
    return _plain(runs), deque()


def _plain(runs: Runs) -> deque[Runs]:
    runs = _pieces(runs)
    return deque(runs.pick(slice(i, i + PART_RUNS)) for i in range(0, len(runs.length), PART_RUNS))
