# SPDX-License-Identifier: Apache-2.0
"""A carrier that has what has landed compared with what was sent.

Transports check what they carry, if only by TCP's 16 bits; this finds what they miss, and what went wrong
before or behind them: a NIC, a bridge, a memory. Who does not want it does not have it: then no write passes
through here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Runs
from kvpushd.errors import Invalid
from kvpushd.mover.transport.base import INSPECTED_BYTES, INSPECTED_RUNS, Carrier, Completion, Region, Write

SAMPLED = 16
"""Where a sample is verified: one write of so many, not always in the same place, as writes may repeat."""

# Our own inspections get ids that no daemon gives out.
_OURS = 1 << 61


@dataclass(slots=True)
class _Check:
    """A write that landed, and the pieces of it that are not inspected yet."""

    write: Write
    pieces: Iterator[Runs]
    under_way: bool = False


class Verifying:
    """Carries by `inner`; a write that landed is reported once it was inspected, with a fault if it differs.

    One write in each `every` is verified, one at a time.
    """

    def __init__(self, inner: Carrier, every: int = 1) -> None:
        self._inner = inner
        self._every = every
        self._count = 0
        # The same order in each mover: what was found once is found again.
        self._random = random.Random(every)
        self._places: list[int] = []
        self._posted: dict[int, Write] = {}
        self._checks: deque[_Check] = deque()

    @property
    def name(self) -> str:
        """The inner carrier's."""
        return self._inner.name

    def register(self, region: Region) -> None:
        """As the inner carrier."""
        self._inner.register(region)

    def deregister(self, pool_id: bytes) -> None:
        """As the inner carrier."""
        self._inner.deregister(pool_id)

    def post(self, write: Write) -> None:
        """As the inner carrier."""
        self._inner.post(write)
        place = self._count % self._every
        self._count += 1
        if not self._places:
            self._places = self._random.sample(range(self._every), self._every)
        if place == self._places[-1]:
            self._posted[write.write_id] = write
        if place == self._every - 1:
            self._places.pop()

    def inspect(self, write: Write) -> None:
        """As the inner carrier."""
        self._inner.inspect(write)

    def poll(self) -> list[Completion]:
        """As the inner carrier; what landed and is to be verified is held back until it was."""
        done = []
        for completion in self._inner.poll():
            if completion.write_id >= _OURS:
                check = self._checks[0]
                check.under_way = False
                if completion.fault is not None:
                    done.append(self._end(completion.fault))
                continue
            write = self._posted.pop(completion.write_id, None)
            if write is None or completion.fault is not None:
                done.append(completion)
            else:
                self._checks.append(_Check(write, _pieces(write.runs)))
        return done + self._go_on()

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        under_way = sum(1 for check in self._checks if check.under_way)
        return self._inner.in_flight - under_way + len(self._checks)

    def close(self) -> None:
        """As the inner carrier."""
        self._checks.clear()
        self._inner.close()

    def _go_on(self) -> list[Completion]:
        """Has the next piece inspected, unless one is; says which writes are through."""
        done = []
        while self._checks and not self._checks[0].under_way:
            check = self._checks[0]
            piece = next(check.pieces, None)
            if piece is None:
                done.append(self._end(None))
                continue
            try:
                write = check.write
                self._inner.inspect(replace(write, write_id=write.write_id + _OURS, runs=piece))
                check.under_way = True
            except Invalid as error:  # the way was closed with the write's end
                done.append(self._end(Fault(Reason.TRANSPORT_FAILED, f"it can't be inspected: {error}")))
        return done

    def _end(self, fault: Fault | None) -> Completion:
        return Completion(self._checks.popleft().write.write_id, fault)


def _pieces(runs: Runs, most: int = INSPECTED_BYTES) -> Iterator[Runs]:
    """The runs, in order, as pieces of at most so many bytes each, and INSPECTED_RUNS runs."""
    rows: list[tuple[int, int, int]] = []
    room = most
    for source, target, length in zip(
        runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True
    ):
        done = 0
        while done < length:
            part = min(length - done, room)
            rows.append((source + done, target + done, part))
            done += part
            room -= part
            if not room or len(rows) == INSPECTED_RUNS:
                yield _runs(rows)
                rows, room = [], most
    if rows:
        yield _runs(rows)


def _runs(rows: list[tuple[int, int, int]]) -> Runs:
    source, target, length = np.array(rows, np.int64).T
    return Runs(source=source, target=target, length=length)
