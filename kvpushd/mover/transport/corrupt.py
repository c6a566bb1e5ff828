# SPDX-License-Identifier: Apache-2.0
"""A carrier that damages what it carries: a deliberate fault, to prove that a check of the bytes checks."""

from __future__ import annotations

import os

import numpy as np

from kvpushd.core.runs import Runs
from kvpushd.errors import Invalid
from kvpushd.memory.host import Mapping
from kvpushd.mover.transport.base import Carrier, Completion, Region, Write

SCRATCH = b"kvpushd-scratch"
WRONG_BYTES = 64

# Our own writes get ids that no daemon gives out.
_OURS = 1 << 63


class Corrupting:
    """Carries by `inner`; over each write that landed it lands one more run of wrong bytes, then reports it.

    The run is as long as the write's first, 64 bytes at most. `scratch` is where the wrong bytes come from.
    """

    def __init__(self, inner: Carrier, scratch: Mapping) -> None:
        self._inner = inner
        self._scratch = scratch
        self._posted: dict[int, Write] = {}
        np.frombuffer(scratch.view, np.uint8)[:] = np.frombuffer(os.urandom(scratch.nbytes), np.uint8)
        inner.register(Region(SCRATCH, scratch.address, scratch.nbytes))

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
        self._posted[write.write_id] = write

    def inspect(self, write: Write) -> None:
        """As the inner carrier."""
        self._inner.inspect(write)

    def poll(self) -> list[Completion]:
        """As the inner carrier; what landed is held back until its wrong bytes have landed too."""
        done = []
        for completion in self._inner.poll():
            if completion.write_id >= _OURS:
                done.append(Completion(completion.write_id - _OURS, completion.fault))
                continue
            write = self._posted.pop(completion.write_id, None)
            if write is None or completion.fault is not None or not self._spoil(write):
                done.append(completion)
        return done

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        return self._inner.in_flight

    def close(self) -> None:
        """As the inner carrier."""
        self._inner.close()

    def _spoil(self, write: Write) -> bool:
        """Posts the wrong bytes; False where the outlet was closed with the write's end."""
        try:
            self._inner.post(self._wrong(write))
        except Invalid:
            return False
        return True

    def _wrong(self, write: Write) -> Write:
        length = min(int(write.runs.length[0]), self._scratch.nbytes)
        runs = Runs(
            source=np.zeros(1, np.int64), target=write.runs.target[:1], length=np.array([length], np.int64)
        )
        return Write(write.write_id + _OURS, write.outlet_id, SCRATCH, write.target_pool, runs)
