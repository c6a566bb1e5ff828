# SPDX-License-Identifier: Apache-2.0
"""The sending end of parcels: what is packed here travels as one run, and is unpacked over there."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from kvpushd.core.runs import Runs
from kvpushd.errors import TransportFailed
from kvpushd.memory.host import Bytes
from kvpushd.mover.transport.agents import register
from kvpushd.mover.transport.base import Landing
from kvpushd.mover.transport.parcel import (
    NUMBER_BITS,
    REFUSED,
    SLOTS,
    WORD_BYTES,
    Slots,
    bell,
    pack,
    slot_offset,
    word_offset,
)
from kvpushd.mover.transport.transfer import Errors, Rows, Transfer, rows


class Staging:
    """The slots of an outlet, each of which leads to the slot of the same number at the receiver's dock."""

    def __init__(self, sender: Any, agent: str, landing: Landing, errors: Errors) -> None:
        """Registers them with the agent `sender`. Raises NIXL's errors."""
        self._errors = errors
        self._slots = Slots()
        self._sender = sender
        self._agent = agent
        self._landing = landing
        self._free = list(range(SLOTS))
        self._asks: dict[int, Transfer] = {}
        register(sender, self._slots.address, self._slots.nbytes)

    def close(self) -> None:
        """Lets go of the agent, last of all, and before the memory goes: UCX may be reading it."""
        self._asks.clear()
        self._sender = None

    @property
    def has_room(self) -> bool:
        """Whether another parcel can be packed."""
        return bool(self._free)

    def send(self, pool_id: bytes, source: Bytes, runs: Runs) -> Parcel:
        """Packs runs of `source` for the pool of that name and begins to write them. Raises NIXL's errors."""
        slot = self._free.pop(0)
        number = secrets.randbits(NUMBER_BITS) or 1
        nbytes = pack(self._slots.slot(slot), number, pool_id, source, runs)
        at = slot_offset(slot)
        write = self.transfer("WRITE", at, nbytes, bell(slot, number))
        parcel = Parcel(self, slot, number, write)
        write.begin()
        return parcel

    def transfer(self, operation: str, offset: int, nbytes: int, message: bytes = b"") -> Transfer:
        """Between the same bytes of the slots on both sides. Raises NIXL's errors."""
        near, far = _row(self._slots.address + offset, nbytes), _row(self._landing.address + offset, nbytes)
        return Transfer(self._sender, self._agent, operation, near, far, self._errors, message)

    def ask(self, slot: int) -> Transfer:
        """Begins to read the word of a slot. Raises NIXL's errors."""
        if slot not in self._asks:
            self._asks[slot] = self.transfer("READ", word_offset(slot), WORD_BYTES)
        self._asks[slot].begin()
        return self._asks[slot]

    def word(self, slot: int) -> int:
        """As it was read last."""
        return self._slots.word(slot)

    def give_back(self, slot: int) -> None:
        """What was in it is unpacked."""
        self._free.append(slot)


class Parcel:
    """A part of a write that is under way as one: first written, then asked after until its word is said."""

    runs = 1

    def __init__(self, staging: Staging, slot: int, number: int, write: Transfer) -> None:
        self._staging = staging
        self._slot = slot
        self._number = number
        self._write = write
        self._ask: Transfer | None = None

    def over(self) -> bool:
        """Whether all of it is in its pool. Raises NIXL's errors, TransportFailed where it was refused."""
        if self._ask is None:
            if self._write.ended:
                self._ask = self._staging.ask(self._slot)
            return False
        if not self._ask.ended:
            return False
        word = self._staging.word(self._slot)
        if word == self._number:
            self._staging.give_back(self._slot)
            return True
        if word == self._number | REFUSED:
            raise TransportFailed("the receiver can't unpack what was packed for it")
        self._ask = self._staging.ask(self._slot)
        return False

    def release(self) -> None:
        """Lets go of what NIXL holds for it."""
        self._write.release()


def _row(address: int, nbytes: int) -> Rows:
    return rows(np.array([address]), np.array([nbytes]))
