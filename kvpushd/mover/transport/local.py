# SPDX-License-Identifier: Apache-2.0
"""From one pool to another where this mover maps both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvpushd.errors import Invalid
from kvpushd.mover.transport.base import LOCAL_OUTLET, Completion, Region, Write
from kvpushd.mover.transport.copying import memmove

# What one poll copies at most: about a millisecond, so that the mover still answers between slices.
SLICE_BYTES = 8 << 20


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
        self._queue: deque[tuple[int, Iterator[bool]]] = deque()
        self._copy = memmove()

    def register(self, region: Region) -> None:
        """Makes a pool a possible source and target."""
        self._regions[region.pool_id] = region

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        self._regions.pop(pool_id, None)

    def post(self, write: Write) -> None:
        """Queues a write between two registered pools."""
        if write.outlet_id != LOCAL_OUTLET:
            raise Invalid(f"outlet {write.outlet_id} leads out of this mover, expected {LOCAL_OUTLET}")
        for pool_id in (write.source_pool, write.target_pool):
            if pool_id not in self._regions:
                raise Invalid(f"pool {pool_id.hex()} is not mapped in this mover: map it before writing")
        source, target = self._regions[write.source_pool], self._regions[write.target_pool]
        self._queue.append((write.write_id, self._slices(source.address, target.address, write)))

    def poll(self) -> list[Completion]:
        """Copies one slice of the write that waits longest."""
        if not self._queue:
            return []
        write_id, slices = self._queue.popleft()
        if next(slices):
            return [Completion(write_id)]
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

    def _slices(self, source: int, target: int, write: Write) -> Iterator[bool]:
        """Copies, a slice per step; yields False after each slice but the last, then True."""
        sources = (write.runs.source + source).tolist()
        targets = (write.runs.target + target).tolist()
        if write.back:
            sources, targets = targets, sources
        budget = self._slice_bytes
        for begin, to, length in zip(sources, targets, write.runs.length.tolist(), strict=True):
            done = 0
            while done < length:
                if budget == 0:
                    yield False
                    budget = self._slice_bytes
                part = min(length - done, budget)
                self._copy(to + done, begin + done, part)
                done += part
                budget -= part
        yield True
