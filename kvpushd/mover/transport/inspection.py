# SPDX-License-Identifier: Apache-2.0
"""What has landed compared with what was sent, by a checksum on either side."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Mapping as Map
from dataclasses import dataclass

import numpy as np

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Runs, check_runs
from kvpushd.errors import Invalid
from kvpushd.memory.host import Bytes
from kvpushd.mover.transport.base import INSPECTED_BYTES, INSPECTED_RUNS, Completion
from kvpushd.mover.transport.checksum import checksum, differs
from kvpushd.mover.transport.notices import NO_SUM, Added, Inspect

AGAIN_SECONDS = 0.5
"""After which it is asked again: where the receiver is gone, that is what shows it."""
PATIENCE = 10.0
"""Seconds for an answer, after which there will be none."""
_ROW = np.dtype("<i8")


@dataclass(slots=True)
class _Open:
    """An inspection that has not ended."""

    write_id: int
    said: Inspect
    source: Bytes
    runs: Runs
    asked: float | None = None
    since: float = 0.0
    checksum: int = NO_SUM
    """Of the source, once it was asked for that of the target."""


class Inspections:
    """The sender's end: one at a time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._open: deque[_Open] = deque()
        self._answer: Added | None = None

    def add(self, write_id: int, source: Bytes, pool: int, runs: Runs) -> None:
        """Asks for an inspection of runs of `source` that landed in the pool at that address."""
        rows = np.stack((runs.target, runs.length)).astype(_ROW).tobytes()
        self._open.append(_Open(write_id, Inspect(secrets.randbits(64), pool, rows), source, runs))

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._open)

    @property
    def write_ids(self) -> list[int]:
        """Those that have not ended."""
        return [each.write_id for each in self._open]

    def hear(self, added: Added) -> None:
        """What the receiver says."""
        self._answer = added

    def step(self, tell: Callable[[Inspect], None]) -> Completion | None:
        """Asks for what is next by `tell`, and says how it ended; None while nothing is known.

        Raises what `tell` raises.
        """
        if not self._open:
            return None
        first, answer = self._open[0], self._answer
        now = time.monotonic()
        if answer is not None and answer.number == first.said.number:
            self._open.popleft()
            return Completion(first.write_id, self._judge(first, answer))
        if first.asked is None:
            first.since = now
        elif now - first.since > PATIENCE:
            detail = f"the receiver has not said within {PATIENCE:g} s what has landed"
            return self.give_up(Fault(Reason.TRANSPORT_FAILED, detail))
        if first.asked is None or now - first.asked > AGAIN_SECONDS:
            first.asked = now
            tell(first.said)
            # While the receiver adds up, too.
            first.checksum = checksum(first.source, first.runs.source, first.runs.length)
        return None

    def give_up(self, fault: Fault) -> Completion:
        """Ends the first with a fault."""
        return Completion(self._open.popleft().write_id, fault)

    def _judge(self, opened: _Open, answer: Added) -> Fault | None:
        if answer.checksum == NO_SUM:
            return Fault(Reason.TRANSPORT_FAILED, "the receiver can't inspect what was written to it")
        return None if answer.checksum == opened.checksum else differs(opened.runs)


def inspected(asked: Inspect, pools: Map[int, Bytes]) -> Added:
    """The receiver's end: the answer, whatever was asked."""
    try:
        return Added(asked.number, _checksum_of(asked, pools))
    except Invalid:
        return Added(asked.number, NO_SUM)


def _checksum_of(asked: Inspect, pools: Map[int, Bytes]) -> int:
    pool = pools.get(asked.pool)
    count, rest = divmod(len(asked.rows), 2 * _ROW.itemsize)
    if pool is None or rest or count > INSPECTED_RUNS:
        raise Invalid(f"{len(asked.rows)} bytes of runs for {asked.pool:#x}, expected a pool of the inlet")
    offsets, lengths = np.frombuffer(asked.rows, _ROW).reshape(2, count)
    check_runs(offsets, lengths, len(pool), INSPECTED_BYTES)
    return checksum(pool, offsets, lengths)
