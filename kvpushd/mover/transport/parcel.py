# SPDX-License-Identifier: Apache-2.0
"""Short runs of a write, copied together so that they travel as one.

Over TCP a run costs NIXL and the kernel 20 us of CPU before its bytes cost anything; to copy 4 KiB costs
2 us, on either side. So a sender packs short runs into a slot of its own memory and writes that to the slot
of the same number at the receiver's dock, which unpacks it. The layout of a slot:

    number (8 bytes), address of the pool's first byte (8), runs (8)
    offset in the pool and length of each run (8 + 8)
    the bytes, in that order, from the next multiple of 64

The number is drawn anew for each parcel. The bell that follows a parcel says its slot and its number: what
does not find that number in that slot, or finds it a second time, unpacks nothing.

Pure memory: what carries slots and bells is the transport's business.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping as Map

import numpy as np

from kvpushd.core.runs import Runs, check_runs
from kvpushd.errors import Invalid
from kvpushd.memory.host import Bytes, Mapping
from kvpushd.mover.transport.copying import gather, scatter
from kvpushd.mover.transport.notices import Bell, Unpacked

SLOTS = 4
"""One is filled and one emptied while two are on their way; with eight, more than a cache holds, fewer bytes
per second came. Four MiB on either side of a way that is used."""
SLOT_BYTES = 1 << 20
"""A parcel of this length costs its fabric what a long run costs."""
SLOTS_BYTES = SLOTS * SLOT_BYTES
NUMBER_BITS = 64
SHORT_BYTES = 64 << 10
"""Runs below this are packed. Over loopback TCP, as they are and packed: at 4 KiB 0.34 and 1.1 GB/s, 5.4 and
1.5 CPU s per GB; at 16 KiB 0.7 and 1.4, 2.7 and 1.2; at 64 KiB 1.5 and 1.45, 1.3 and 1.2. (By CMA only those
of 4 KiB gain, 0.87 and 1.7 GB/s; those of 16 KiB lose, 2.3 and 1.8.)"""
FEW_RUNS = 32
"""So many go as they are: a parcel is there only after the receiver has said so."""

_HEAD = struct.Struct("<QQQ")
_ROW_BYTES = 16
_ALIGNED = 64


class Slots:
    """The slots of one end of a way."""

    def __init__(self, memory: Mapping, begin: int = 0) -> None:
        """They are the SLOTS_BYTES from `begin` of some memory."""
        self.address = memory.address + begin
        """Of the first one; the others follow it."""
        cells = np.frombuffer(memory.view, np.uint8)
        self._slots = cells[begin : begin + SLOTS_BYTES].reshape(SLOTS, SLOT_BYTES)

    def slot(self, number: int) -> Bytes:
        """The bytes of one."""
        found: Bytes = self._slots[number]
        return found


def worth_packing(runs: Runs) -> bool:
    """Whether some of a write shall go as parcels."""
    return int((runs.length < SHORT_BYTES).sum()) > FEW_RUNS


def parcels_of(runs: Runs) -> deque[Runs]:
    """Cuts short runs into what has room in a slot each."""
    ends = np.cumsum(runs.length + _ROW_BYTES)
    room = SLOT_BYTES - _HEAD.size - _ALIGNED
    parcels: deque[Runs] = deque()
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + room, side="right"))
        parcels.append(runs.pick(slice(first, last)))
        first = last
    return parcels


def pack(slot: Bytes, number: int, pool: int, source: Bytes, runs: Runs) -> int:
    """Fills a slot with runs of `source`, for the pool at that address; returns how many bytes it is."""
    count = len(runs.length)
    _HEAD.pack_into(slot.data, 0, number, pool, count)
    table = slot[_HEAD.size : _HEAD.size + count * _ROW_BYTES].view(np.int64).reshape(2, count)
    table[0], table[1] = runs.target, runs.length
    begin = _begin(count)
    end = begin + int(runs.length.sum())
    gather(source, runs.source, runs.length, slot[begin:end])
    return end


class Dock:
    """The receiving end: slots that parcels come to, and the pools that they are unpacked into."""

    def __init__(self, slots: Slots, pools: Map[int, Bytes]) -> None:
        """`pools` are found by the addresses that the sender knows them by."""
        self.slots = slots
        self._pools = pools
        self._last: list[Unpacked | None] = [None] * SLOTS
        """What was said of the parcels that were found in the slots."""

    def rang(self, bell: Bell) -> Unpacked | None:
        """Unpacks the parcel that a bell was rung for, once; None where there is no such parcel."""
        if bell.slot >= SLOTS:
            return None
        last = self._last[bell.slot]
        if last is not None and last.number == bell.number:
            return last
        slot = self.slots.slot(bell.slot)
        if _HEAD.unpack_from(slot.data)[0] != bell.number:
            return None
        try:
            self._unpack(slot)
        except Invalid:
            said = Unpacked(bell.slot, bell.number, refused=True)
        else:
            said = Unpacked(bell.slot, bell.number)
        self._last[bell.slot] = said
        return said

    def _unpack(self, slot: Bytes) -> None:
        """Raises Invalid, and touches no pool, where a run is not inside of its pool or of the slot."""
        _, address, count = _HEAD.unpack_from(slot.data)
        pool = self._pools.get(address)
        begin = _begin(count)
        if pool is None or not count or begin > SLOT_BYTES:
            raise Invalid(f"a parcel of {count} runs for {address:#x}, expected a pool of the inlet")
        # A copy: who can write to the slot could change what was checked.
        table = slot[_HEAD.size : _HEAD.size + count * _ROW_BYTES].copy().view(np.int64).reshape(2, count)
        offsets, lengths = table
        check_runs(offsets, lengths, len(pool), SLOT_BYTES - begin)
        scatter(slot[begin : begin + int(lengths.sum())], pool, offsets, lengths)


def _begin(count: int) -> int:
    return -(-(_HEAD.size + count * _ROW_BYTES) // _ALIGNED) * _ALIGNED
