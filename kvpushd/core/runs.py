# SPDX-License-Identifier: Apache-2.0
"""Byte runs, and how they are multiplied out and merged. Nothing here knows layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpushd.errors import Invalid, OverLimit

Int64s = NDArray[np.int64]

# A layout of single bytes in two orders would take the mover's memory: 24 bytes of plan per byte moved.
MAX_RUNS = 1 << 24
CLOSE = 8
"""Numbers are close together where there are no more than so many for each that is there."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs of equal length on both sides: three int64 arrays of one length."""

    source: Int64s
    target: Int64s
    length: Int64s

    def pick(self, some: slice | NDArray[np.bool_]) -> Runs:
        """Some of them, in their order."""
        return Runs(self.source[some], self.target[some], self.length[some])


@dataclass(frozen=True, slots=True)
class Axis:
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

    def merged(self, unit: int) -> Axis:
        """The axis with indices joined whose pieces of `unit` bytes touch on both sides."""
        firsts = _firsts(self.source, self.target, unit)
        return Axis(
            self.source[firsts],
            self.target[firsts],
            np.diff(firsts, append=len(self.source)).astype(np.int64),
        )


def axis_of(source: Int64s, target: Int64s) -> Axis:
    """The axis with these offsets, in any order."""
    if (source[1:] < source[:-1]).any():
        order = np.argsort(source)
        source, target = source[order], target[order]
    return Axis(source, target, np.ones(len(source), np.int64))


def product(axes: Sequence[Axis], unit: int, room: int) -> Runs:
    """The runs of all combinations of indices, each `unit` bytes. Merges before it multiplies, where it can.

    Raises OverLimit if they are more than `room`.
    """
    outer = sorted(axes, key=lambda axis: axis.step)
    inner: list[Axis] = []
    reach = unit
    while outer:
        axis = outer.pop(0).merged(reach)
        inner.append(axis)
        if len(axis.source) > 1:
            break
        # All of it is one run on both sides: the next axis counts in those.
        reach *= int(axis.length[0])
    bound(math.prod(len(axis.source) for axis in inner + outer), room)
    source = target = np.zeros(1, np.int64)
    length = np.full(1, unit, np.int64)
    # The axis with the longest step outermost: so the runs come out in the source's order, if one exists.
    for axis in sorted(inner + outer, key=lambda axis: axis.step, reverse=True):
        source = np.add.outer(source, axis.source).ravel()
        target = np.add.outer(target, axis.target).ravel()
        length = np.multiply.outer(length, axis.length).ravel()
    return Runs(source, target, length)


def order_of(numbers: Int64s) -> NDArray[np.integer[Any]]:
    """What puts one or more numbers in ascending order. Where they are close together, as block ids are, each
    is put in its place, which takes a quarter of the time of a sort."""
    low = numbers.min()
    span = int(numbers.max() - low) + 1
    if span <= CLOSE * len(numbers):
        places = np.full(span, -1, np.int32)
        places[numbers - low] = np.arange(len(numbers), dtype=np.int32)
        order = places[places >= 0]
        if len(order) == len(numbers):  # else one came twice
            return order
    return np.argsort(numbers, kind="stable")


def numbered(counts: Int64s) -> Int64s:
    """The numbers below each count, from 0 on, one count after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def check_runs(offsets: Int64s, lengths: Int64s, pool_bytes: int, room: int) -> None:
    """Raises Invalid where a run that another has named is not inside of its pool, or all are too long."""
    # One by one, since a sum of the two could wrap round.
    inside = (offsets >= 0) & (offsets <= pool_bytes) & (lengths > 0) & (lengths <= room)
    if not inside.all() or (offsets + lengths > pool_bytes).any() or lengths.sum() > room:
        raise Invalid(f"runs that leave their pool of {pool_bytes:,} bytes, or are more than {room:,} bytes")


def bound(runs: int, room: int) -> None:
    """Raises OverLimit if `runs` are more than `room`."""
    if runs > room:
        raise OverLimit(
            f"one write of more than {MAX_RUNS:,} runs: move fewer positions or layers at a time, or give "
            "both engines the same block size and the same order of heads and tokens"
        )


def joined(parts: Sequence[Runs]) -> Runs:
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
