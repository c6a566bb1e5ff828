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
from kvpushd.mover.transport.notices import Bell, Unpacked
from kvpushd.mover.transport.parcel import NUMBER_BITS, SLOT_BYTES, SLOTS, Slots, pack
from kvpushd.mover.transport.transfer import Errors, Transfer, rows


class Staging:
    """The slots of an outlet, each of which leads to the slot of the same number at the receiver's dock."""

    def __init__(self, sender: Any, agent: str, landing: int, errors: Errors) -> None:
        """Registers them with the agent `sender`; the dock's are at `landing`. Raises NIXL's errors."""
        self._errors = errors
        self._slots = Slots()
        self._sender = sender
        self._agent = agent
        self._landing = landing
        self._free = list(range(SLOTS))
        self._said: dict[int, Unpacked] = {}
        """What was said of the parcels that are under way, by slot."""
        register(sender, self._slots.address, self._slots.nbytes)

    def close(self) -> None:
        """Lets go of the agent, last of all, and before the memory goes: UCX may be reading it."""
        self._sender = None

    @property
    def has_room(self) -> bool:
        """Whether another parcel can be packed."""
        return bool(self._free)

    @property
    def is_waiting(self) -> bool:
        """Whether parcels are under way."""
        return len(self._free) < SLOTS

    def send(self, pool: int, source: Bytes, runs: Runs) -> Parcel:
        """Packs runs of `source` for the pool at that address, and begins to write them.

        Raises NIXL's errors.
        """
        slot = self._free.pop(0)
        number = secrets.randbits(NUMBER_BITS)
        nbytes = pack(self._slots.slot(slot), number, pool, source, runs)
        near, far = (_row(at + slot * SLOT_BYTES, nbytes) for at in (self._slots.address, self._landing))
        bell = bytes(Bell(slot, number))
        write = Transfer(self._sender, self._agent, "WRITE", near, far, self._errors, bell)
        self._said.pop(slot, None)
        try:
            write.begin()
        except self._errors:
            write.release()
            raise
        return Parcel(self, slot, number, write)

    def hear(self, said: Unpacked) -> None:
        """What the receiver says of a parcel."""
        if said.slot < SLOTS:
            self._said[said.slot] = said

    def unpacked(self, slot: int, number: int) -> bool:
        """Whether a parcel is known to be. Raises TransportFailed where it was refused."""
        said = self._said.get(slot)
        if said is None or said.number != number:
            return False
        if said.refused:
            raise TransportFailed("the receiver can't unpack what was packed for it")
        self._free.append(slot)
        return True


class Parcel:
    """A part of a write that is under way as one: first written, then waited for until it is unpacked."""

    runs = 1

    def __init__(self, staging: Staging, slot: int, number: int, write: Transfer) -> None:
        self._staging = staging
        self._slot = slot
        self._number = number
        self._write = write
        self._written = False

    def over(self) -> bool:
        """Whether all of it is in its pool. Raises NIXL's errors, TransportFailed where it was refused."""
        self._written = self._written or self._write.ended
        return self._written and self._staging.unpacked(self._slot, self._number)

    def release(self) -> None:
        """Lets go of what NIXL holds for it."""
        self._write.release()


def _row(address: int, nbytes: int) -> np.ndarray:
    return rows(np.array([address]), np.array([nbytes]))
