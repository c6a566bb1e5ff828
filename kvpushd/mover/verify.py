# SPDX-License-Identifier: Apache-2.0
"""A carrier that has what has landed compared with what was sent.

Transports check what they carry, if only by TCP's 16 bits; this finds what they miss, and what went wrong
before or behind them: a NIC, a bridge, a memory. Who does not want it does not have it: then no write passes
through here.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
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

    One write in each `every` is verified, one at a time for each outlet: who does not answer keeps nobody
    else waiting.
    """

    def __init__(self, inner: Carrier, every: int = 1) -> None:
        self._inner = inner
        self._every = every
        self._count = 0
        # The same order in each mover: what was found once is found again.
        self._random = random.Random(every)
        self._places: list[int] = []
        self._posted: dict[int, Write] = {}
        self._checks: dict[int, deque[_Check]] = defaultdict(deque)
        """By outlet, what is inspected and what waits for that."""
        self._inspected: dict[int, int] = {}
        """The outlets of the inspections under way."""

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
            outlet = self._inspected.pop(completion.write_id, None)
            if outlet is not None:
                self._checks[outlet][0].under_way = False
                if completion.fault is not None:
                    done.append(self._end(outlet, completion.fault))
                continue
            write = self._posted.pop(completion.write_id, None)
            if write is None or completion.fault is not None:
                done.append(completion)
            else:
                self._checks[write.outlet_id].append(_Check(write, _pieces(write.runs)))
        for outlet in list(self._checks):
            done += self._go_on(outlet)
        return done

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        held = sum(len(checks) for checks in self._checks.values())
        return self._inner.in_flight - len(self._inspected) + held

    def close(self) -> None:
        """As the inner carrier."""
        self._checks.clear()
        self._inner.close()

    def _go_on(self, outlet: int) -> list[Completion]:
        """Has an outlet's next piece inspected, unless one is; says which of its writes are through."""
        done = []
        checks = self._checks[outlet]
        while checks and not checks[0].under_way:
            piece = next(checks[0].pieces, None)
            if piece is None:
                done.append(self._end(outlet, None))
                continue
            write = checks[0].write
            ours = replace(write, write_id=write.write_id + _OURS, runs=piece)
            try:
                self._inner.inspect(ours)
                self._inspected[ours.write_id] = outlet
                checks[0].under_way = True
            except Invalid as error:  # the way was closed with the write's end
                fault = Fault(Reason.TRANSPORT_FAILED, f"it can't be inspected: {error}")
                done.append(self._end(outlet, fault))
        if not checks:
            del self._checks[outlet]
        return done

    def _end(self, outlet: int, fault: Fault | None) -> Completion:
        return Completion(self._checks[outlet].popleft().write.write_id, fault)


def _pieces(runs: Runs) -> Iterator[Runs]:
    """The runs, in order, as pieces of at most INSPECTED_BYTES each, and INSPECTED_RUNS runs."""
    rows: list[tuple[int, int, int]] = []
    room = INSPECTED_BYTES
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
                rows, room = [], INSPECTED_BYTES
    if rows:
        yield _runs(rows)


def _runs(rows: list[tuple[int, int, int]]) -> Runs:
    source, target, length = np.array(rows, np.int64).T
    return Runs(source=source, target=target, length=length)
