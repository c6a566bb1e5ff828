# SPDX-License-Identifier: Apache-2.0
"""From one pool to another where this mover maps both."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from kvpush_client.events import Fault
from kvpushd.errors import Invalid
from kvpushd.memory.host import bytes_at
from kvpushd.mover.transport.base import LOCAL_OUTLET, Completion, Region, Write
from kvpushd.mover.transport.checksum import checksum, differs
from kvpushd.mover.transport.copying import memmove

# What one poll copies at most: about a millisecond, so that the mover still answers between slices.
SLICE_BYTES = 8 << 20

_Slices = Generator[None, None, Fault | None]


class LocalCarrier:
    """Copies with the C library: the interpreter sees addresses, never bytes.

    On a busy two-core machine, where repeats differ by up to 2x, process_vm_writev was about as fast in runs
    of 16 KiB and less, mostly slower above. Gathering equal runs with numpy was three times as fast at 4 KiB,
    and is left out, since merged runs are mostly larger.

    Writes are served round robin, a slice each, so that a small one does not wait for a large one.
    """

    name = "local"

    def __init__(self, slice_bytes: int = SLICE_BYTES) -> None:
        self._slice_bytes = slice_bytes
        self._regions: dict[bytes, Region] = {}
        self._queue: deque[tuple[int, _Slices]] = deque()
        self._copy = memmove()

    def register(self, region: Region) -> None:
        """Makes a pool a possible source and target."""
        self._regions[region.pool_id] = region

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        self._regions.pop(pool_id, None)

    def post(self, write: Write) -> None:
        """Queues a write between two registered pools."""
        self._queue.append((write.write_id, self._copied(*self._ends_of(write), write)))

    def inspect(self, write: Write) -> None:
        """Queues a comparison of the two."""
        self._queue.append((write.write_id, self._compared(*self._ends_of(write), write)))

    def _ends_of(self, write: Write) -> tuple[Region, Region]:
        if write.outlet_id != LOCAL_OUTLET:
            raise Invalid(f"outlet {write.outlet_id} leads out of this mover, expected {LOCAL_OUTLET}")
        for pool_id in (write.source_pool, write.target_pool):
            if pool_id not in self._regions:
                raise Invalid(f"pool {pool_id.hex()} is not mapped in this mover: map it before writing")
        return self._regions[write.source_pool], self._regions[write.target_pool]

    def poll(self) -> list[Completion]:
        """Does one slice of the write that waits longest."""
        if not self._queue:
            return []
        write_id, slices = self._queue.popleft()
        try:
            next(slices)
        except StopIteration as stop:
            return [Completion(write_id, stop.value)]
        self._queue.append((write_id, slices))
        return []

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        return len(self._queue)

    def close(self) -> None:
        """Forgets everything."""
        self._queue.clear()
        self._regions.clear()

    def _copied(self, near: Region, far: Region, write: Write) -> _Slices:
        """Copies, a slice per step."""
        sources = (write.runs.source + near.address).tolist()
        targets = (write.runs.target + far.address).tolist()
        budget = self._slice_bytes
        for begin, to, length in zip(sources, targets, write.runs.length.tolist(), strict=True):
            done = 0
            while done < length:
                if budget == 0:
                    yield
                    budget = self._slice_bytes
                part = min(length - done, budget)
                self._copy(to + done, begin + done, part)
                done += part
                budget -= part
        return None

    def _compared(self, near: Region, far: Region, write: Write) -> _Slices:
        """Compares in one step: it is no more than an inspection may be."""
        yield
        runs = write.runs
        ends = ((near, runs.source), (far, runs.target))
        sent, landed = (checksum(bytes_at(at.address, at.nbytes), where, runs.length) for at, where in ends)
        return None if sent == landed else differs(runs)
