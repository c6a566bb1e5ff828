# SPDX-License-Identifier: Apache-2.0
"""What is moved in a turn: a pool's worth of runs, over a transport."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

POOL_BYTES = 256 << 20
NEIGHBOURS = 256 << 10
"""Runs that can be merged are shuffled within so many bytes, or four of them: so that a transfer that is cut
somewhere still merges."""

_MADV_POPULATE_WRITE = 23

Shape = Literal["contiguous", "mergeable", "fragmented"]
TRANSPORTS = {"tcp": "tcp,self", "cma": "all"}
"""UCX_TLS of each. UCX's own choice between two processes of one host is CMA."""
RUNS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Case:
    """Runs of `run` bytes.

    contiguous      in order on both sides
    mergeable       in a shuffled order, but what are neighbours at the source are neighbours at the target
    fragmented      shuffled at the target alone: nothing merges
    """

    transport: str
    shape: Shape
    run: int

    @property
    def name(self) -> str:
        """As the report names it."""
        return f"{self.transport}-{self.shape}-{self.run >> 10}K"

    @property
    def large(self) -> bool:
        """Whether its runs are of 64 KiB and more."""
        return self.run >= 64 << 10


_FULL: dict[Shape, tuple[int, ...]] = {"contiguous": RUNS[2::2], "mergeable": RUNS[::2], "fragmented": RUNS}
_QUICK: dict[Shape, tuple[int, ...]] = {"mergeable": RUNS[:1], "fragmented": RUNS[2::2]}


def every(quick: bool) -> Iterator[Case]:
    """All cases of a run."""
    for transport in TRANSPORTS:
        for shape, runs in (_QUICK if quick else _FULL).items():
            for run in runs:
                yield Case(transport, shape, run)


def places(shape: Shape, run: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The blocks of `run` bytes to read from and to write to, in the order in which they are named."""
    count = POOL_BYTES // run
    order = np.arange(count, dtype=np.int64)
    random = np.random.default_rng(11)
    if shape == "mergeable":
        group = max(NEIGHBOURS // run, 4)
        order = random.permuted(order.reshape(-1, group), axis=1).reshape(-1)
    if shape == "fragmented":
        return order, random.permutation(order)
    return order, order


def mapped(path: str) -> NDArray[np.uint8]:
    """A pool of memory.Memory's, with its page tables filled in."""
    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, POOL_BYTES)
    os.close(fd)
    memory.madvise(_MADV_POPULATE_WRITE)
    return np.frombuffer(memory, np.uint8)


def pattern() -> NDArray[np.uint8]:
    """What a source pool holds: no two of its eight-byte words are equal."""
    return (np.arange(1, POOL_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def arrived(target: NDArray[np.uint8], shape: Shape, run: int) -> bool:
    """Whether a target pool holds all of the pattern, each run in its place."""
    sources, targets = places(shape, run)
    found = target.reshape(-1, run)
    wanted = pattern().reshape(-1, run)
    step = max((8 << 20) // run, 1)
    return all(
        np.array_equal(found[targets[i : i + step]], wanted[sources[i : i + step]])
        for i in range(0, len(sources), step)
    )
