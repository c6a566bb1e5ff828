# SPDX-License-Identifier: Apache-2.0
"""A carrier that reads back what has landed, and compares it with what was sent.

Transports check what they carry, if only by TCP's 16 bits; this finds what they miss, and what went wrong
before or behind them: a NIC, a bridge, a memory. It needs nothing of the other side, which serves the reads
as it takes the writes in. Who does not want it does not have it: then no write passes through here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Runs
from kvpushd.errors import Invalid
from kvpushd.memory.host import Mapping, bytes_at
from kvpushd.mover.transport.base import Carrier, Completion, Region, Write

SAMPLED = 16
"""Where a sample is verified: one write of so many, not always in the same place, as writes may repeat."""
SCRATCH_BYTES = 8 << 20
"""What is read back at a time: compared within a few milliseconds, so that the mover still goes round."""
SCRATCH = b"kvpushd-read-back"

# Our own reads get ids that no daemon gives out.
_OURS = 1 << 62


@dataclass(slots=True)
class _Check:
    """A write that landed, and the pieces of it that are not read back yet."""

    write: Write
    pieces: Iterator[Runs]
    reading: Runs | None = None


class Verifying:
    """Carries by `inner`; a write that landed is reported once it was read back, with a fault if it differs.

    One write in each `every` is verified, one at a time. `scratch` is where the bytes are read to.
    """

    def __init__(self, inner: Carrier, scratch: Mapping, every: int = 1) -> None:
        self._inner = inner
        self._scratch = scratch
        self._every = every
        self._count = 0
        # The same order in each mover: what was found once is found again.
        self._random = random.Random(every)
        self._places: list[int] = []
        self._regions: dict[bytes, Region] = {}
        self._posted: dict[int, Write] = {}
        self._checks: deque[_Check] = deque()
        inner.register(Region(SCRATCH, scratch.address, scratch.nbytes))

    @property
    def name(self) -> str:
        """The inner carrier's."""
        return self._inner.name

    def register(self, region: Region) -> None:
        """As the inner carrier."""
        self._inner.register(region)
        self._regions[region.pool_id] = region

    def deregister(self, pool_id: bytes) -> None:
        """As the inner carrier."""
        self._inner.deregister(pool_id)
        self._regions.pop(pool_id, None)

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

    def poll(self) -> list[Completion]:
        """As the inner carrier; what landed and is to be verified is held back until it was."""
        done = []
        for completion in self._inner.poll():
            if completion.write_id >= _OURS:
                done += self._compare(completion)
                continue
            write = self._posted.pop(completion.write_id, None)
            if write is None or completion.fault is not None:
                done.append(completion)
            else:
                self._checks.append(_Check(write, _pieces(write.runs, self._scratch.nbytes)))
        return done + self._read_on()

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        reading = sum(1 for check in self._checks if check.reading is not None)
        return self._inner.in_flight - reading + len(self._checks)

    def close(self) -> None:
        """As the inner carrier."""
        self._checks.clear()
        self._inner.close()

    def _read_on(self) -> list[Completion]:
        """Reads the next piece back, unless one is being read; says which writes are through."""
        done = []
        while self._checks and self._checks[0].reading is None:
            check = self._checks[0]
            check.reading = next(check.pieces, None)
            if check.reading is None:
                done.append(self._end(None))
                continue
            try:
                self._inner.post(self._back(check.write, check.reading))
            except Invalid as error:  # the way was closed with the write's end
                done.append(self._end(Fault(Reason.TRANSPORT_FAILED, f"it can't be read back: {error}")))
        return done

    def _back(self, write: Write, piece: Runs) -> Write:
        into = np.cumsum(piece.length) - piece.length
        runs = Runs(source=into, target=piece.target, length=piece.length)
        return Write(write.write_id + _OURS, write.outlet_id, SCRATCH, write.target_pool, runs, back=True)

    def _compare(self, completion: Completion) -> list[Completion]:
        """Compares the piece that was read; an end, where it is one."""
        check = self._checks[0]
        piece, check.reading = check.reading, None
        assert piece is not None, "only one piece is read at a time"
        if completion.fault is not None:
            return [self._end(completion.fault)]
        region = self._regions[check.write.source_pool]
        sent = bytes_at(region.address, region.nbytes)
        landed = bytes_at(self._scratch.address, self._scratch.nbytes)
        at = 0
        for source, target, length in zip(
            piece.source.tolist(), piece.target.tolist(), piece.length.tolist(), strict=True
        ):
            if not np.array_equal(sent[source : source + length], landed[at : at + length]):
                where = f"bytes {target:,} to {target + length:,} of the receiver's pool"
                return [self._end(Fault(Reason.CORRUPTED, f"{where} are not what was sent"))]
            at += length
        return []

    def _end(self, fault: Fault | None) -> Completion:
        return Completion(self._checks.popleft().write.write_id, fault)


def _pieces(runs: Runs, most: int) -> Iterator[Runs]:
    """The runs, in order, as pieces of at most so many bytes each."""
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
            if not room:
                yield _runs(rows)
                rows, room = [], most
    if rows:
        yield _runs(rows)


def _runs(rows: list[tuple[int, int, int]]) -> Runs:
    source, target, length = np.array(rows, np.int64).T
    return Runs(source=source, target=target, length=length)
