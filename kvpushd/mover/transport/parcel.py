# SPDX-License-Identifier: Apache-2.0
"""Short runs of a write, copied together so that they travel as one.

Over TCP a run costs NIXL and the kernel 20 us of CPU before its bytes cost anything; to copy 4 KiB costs
2 us, on either side. So a
sender packs short runs into a slot of its own memory and writes that to the slot of the same number at the
receiver's dock, which unpacks it. The layout of a slot:

    number (8 bytes), runs (4), length of the pool's name (4), the name (32)
    offset in the pool and length of each run (8 + 8)
    the bytes, in that order, from the next multiple of 64

The number is drawn anew for each parcel. The bell that follows a parcel says its slot and its number: what
does not find that number in that slot, or finds it a second time, unpacks nothing. Once all is in the pool,
the number is in the word that belongs to the slot, for the sender to read; with `REFUSED` where the parcel
makes no sense.

Pure memory: what carries slots and words is the transport's business.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping as Map

import numpy as np

from kvpushd.core.runs import Int64s, Runs
from kvpushd.errors import Invalid
from kvpushd.memory.host import Bytes, anonymous
from kvpushd.mover.transport.base import Landing
from kvpushd.mover.transport.copying import gather, scatter

SLOTS = 4
"""One is filled and one emptied while two are on their way; with eight, more than a cache holds, fewer bytes
per second came. Four MiB on either side of a way that is used."""
SLOT_BYTES = 1 << 20
"""A parcel of this length costs its fabric what a long run costs."""
REFUSED = 1 << 63
NUMBER_BITS = 63
SHORT_BYTES = 64 << 10
"""Runs below this are packed. Over loopback TCP, as they are and packed: at 4 KiB 0.34 and 1.1 GB/s, 5.4 and
1.5 CPU s per GB; at 16 KiB 0.7 and 1.4, 2.7 and 1.2; at 64 KiB 1.5 and 1.45, 1.3 and 1.2. (By CMA only those
of 4 KiB gain, 0.87 and 1.7 GB/s; those of 16 KiB lose, 2.3 and 1.8.)"""
FEW_RUNS = 32
"""So many go as they are: a parcel is there only after the sender has asked for its word."""
MOST_NAME = 32
"""Bytes of the name of a pool that parcels can be for."""
WORD_BYTES = 8

_HEAD = struct.Struct("<QII32s")
_BELL = struct.Struct("<4sIQ")
_RING = b"kvp1"
_ROW_BYTES = 16
_ALIGNED = 64


class Slots:
    """The slots of one end of a way, and behind them a word for each."""

    def __init__(self) -> None:
        self._memory = anonymous(SLOTS * (SLOT_BYTES + WORD_BYTES))
        cells = np.frombuffer(self._memory.view, np.uint8)
        self._slots = cells[: SLOTS * SLOT_BYTES].reshape(SLOTS, SLOT_BYTES)
        self._words = cells[SLOTS * SLOT_BYTES :].view(np.uint64)

    @property
    def address(self) -> int:
        """Of the first slot."""
        return self._memory.address

    @property
    def nbytes(self) -> int:
        """Of all slots and words."""
        return self._memory.nbytes

    @property
    def landing(self) -> Landing:
        """What the other end has to know of these."""
        return Landing(self.address, SLOTS, SLOT_BYTES)

    def slot(self, number: int) -> Bytes:
        """The bytes of a slot."""
        found: Bytes = self._slots[number]
        return found

    def word(self, slot: int) -> int:
        """The word of a slot."""
        return int(self._words[slot])

    def say(self, slot: int, word: int) -> None:
        """Sets the word of a slot."""
        self._words[slot] = word


def slot_offset(slot: int) -> int:
    """Where a slot begins, from the first one's address."""
    return slot * SLOT_BYTES


def word_offset(slot: int) -> int:
    """Where the word of a slot is, from the first one's address."""
    return SLOTS * SLOT_BYTES + slot * WORD_BYTES


def fits(landing: Landing) -> bool:
    """Whether the slots over there are as many and as large as ours."""
    return (landing.slots, landing.slot_bytes) == (SLOTS, SLOT_BYTES)


def worth_packing(pool_id: bytes, runs: Runs) -> bool:
    """Whether some of a write for this pool shall go as parcels."""
    return len(pool_id) <= MOST_NAME and int((runs.length < SHORT_BYTES).sum()) > FEW_RUNS


def parcels_of(runs: Runs) -> deque[Runs]:
    """Cuts short runs into what has room in a slot each."""
    ends = np.cumsum(runs.length + _ROW_BYTES)
    room = SLOT_BYTES - _HEAD.size - _ALIGNED
    parcels: deque[Runs] = deque()
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + room, side="right"))
        parcels.append(Runs(runs.source[first:last], runs.target[first:last], runs.length[first:last]))
        first = last
    return parcels


def pack(slot: Bytes, number: int, pool_id: bytes, source: Bytes, runs: Runs) -> int:
    """Fills a slot with runs of `source` that are for the pool of that name; returns how many bytes it is."""
    count = len(runs.length)
    _HEAD.pack_into(slot.data, 0, number, count, len(pool_id), pool_id)
    table = slot[_HEAD.size : _HEAD.size + count * _ROW_BYTES].view(np.int64).reshape(2, count)
    table[0], table[1] = runs.target, runs.length
    begin = _begin(count)
    end = begin + int(runs.length.sum())
    gather(source, runs.source, runs.length, slot[begin:end])
    return end


def bell(slot: int, number: int) -> bytes:
    """What is said once a parcel is in its slot."""
    return _BELL.pack(_RING, slot, number)


def heard(message: bytes) -> tuple[int, int] | None:
    """Slot and number that a bell says; None where it is no bell, or there is no such slot."""
    if len(message) != _BELL.size:
        return None
    ring, slot, number = _BELL.unpack(message)
    return (slot, number) if ring == _RING and slot < SLOTS else None


class Dock:
    """The receiving end: slots that parcels come to, and the pools that they are unpacked into."""

    def __init__(self, pools: Map[bytes, Bytes]) -> None:
        self.slots = Slots()
        self._pools = pools
        self._last = [0] * SLOTS
        """The numbers that were found in the slots, for words are where the sender can write."""

    def rang(self, message: bytes) -> None:
        """Unpacks the parcel that a bell was rung for, if it is there and was not unpacked before."""
        said = heard(message)
        if said is None:
            return
        slot, number = said
        if _HEAD.unpack_from(self.slots.slot(slot).data)[0] != number or number == self._last[slot]:
            return
        self._last[slot] = number
        try:
            self._unpack(self.slots.slot(slot))
        except Invalid:
            number |= REFUSED
        self.slots.say(slot, number)

    def _unpack(self, slot: Bytes) -> None:
        """Raises Invalid, and touches no pool, where a run is not inside of its pool or of the slot."""
        _, count, length, name = _HEAD.unpack_from(slot.data)
        pool = self._pools.get(name[:length])
        begin = _begin(count)
        if pool is None or not count or begin > SLOT_BYTES:
            raise Invalid(
                f"a parcel of {count} runs for pool {name[:length].hex()}, expected one behind the inlet"
            )
        # A copy: who can write to the slot could change what was checked.
        table = slot[_HEAD.size : _HEAD.size + count * _ROW_BYTES].copy().view(np.int64).reshape(2, count)
        offsets, lengths = table
        _check(offsets, lengths, len(pool), SLOT_BYTES - begin)
        scatter(slot[begin : begin + int(lengths.sum())], pool, offsets, lengths)


def _check(offsets: Int64s, lengths: Int64s, pool_bytes: int, room: int) -> None:
    # One by one, since a sum of the two could wrap round.
    inside = (offsets >= 0) & (offsets <= pool_bytes) & (lengths > 0) & (lengths <= room)
    if not inside.all() or (offsets + lengths > pool_bytes).any() or lengths.sum() > room:
        raise Invalid(f"a parcel's runs leave their pool of {pool_bytes:,} bytes, or are more than is in it")


def _begin(count: int) -> int:
    return -(-(_HEAD.size + count * _ROW_BYTES) // _ALIGNED) * _ALIGNED
