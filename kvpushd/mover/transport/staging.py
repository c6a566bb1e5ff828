# SPDX-License-Identifier: Apache-2.0
"""The sending end of parcels: what is packed here travels as one run, and is unpacked over there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpushd.core.runs import Runs
from kvpushd.errors import TransportFailed
from kvpushd.memory.host import Bytes, anonymous
from kvpushd.mover.transport.agents import register
from kvpushd.mover.transport.notices import Bell, Unpacked
from kvpushd.mover.transport.parcel import NUMBER_BITS, SLOT_BYTES, SLOTS, SLOTS_BYTES, Slots, pack
from kvpushd.mover.transport.transfer import Errors, Rows, Transfer, rows

RING_SECONDS = 0.05
"""After which a bell is rung again. A receiver that is gone ends no write of a parcel that has come to it:
only what is sent to it then shows that it is gone."""


class Staging:
    """The slots of an outlet, each of which leads to the slot of the same number at the receiver's dock."""

    def __init__(
        self, sender: Any, agent: str, landing: int, errors: Errors, tell: Callable[[Bell], None]
    ) -> None:
        """Registers them with the agent `sender`; the dock's are at `landing`. `tell` rings a bell there.

        Raises NIXL's errors.
        """
        self._errors = errors
        memory = anonymous(SLOTS_BYTES)
        self._slots = Slots(memory)
        self._sender = sender
        self._agent = agent
        self._landing = landing
        self._tell = tell
        self._free = list(range(SLOTS))
        self._said: dict[int, Unpacked] = {}
        """What was said of the parcels that are under way, by slot."""
        register(sender, memory.address, memory.nbytes)

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
        bell = Bell(slot, secrets.randbits(NUMBER_BITS))
        nbytes = pack(self._slots.slot(slot), bell.number, pool, source, runs)
        near, far = (_row(at + slot * SLOT_BYTES, nbytes) for at in (self._slots.address, self._landing))
        self._said.pop(slot, None)
        write = Transfer(self._sender, self._agent, near, far, self._errors, bytes(bell))
        return Parcel(self, bell, write)

    def hear(self, said: Unpacked) -> None:
        """What the receiver says of a parcel."""
        if said.slot < SLOTS:
            self._said[said.slot] = said

    def said(self, slot: int) -> Unpacked | None:
        """What it said last of the parcel in a slot."""
        return self._said.get(slot)

    def ring(self, bell: Bell) -> None:
        """Rings a bell once more. Raises NIXL's errors: here, if not before, it is seen that nobody hears."""
        self._tell(bell)

    def give_back(self, slot: int) -> None:
        """What was in it is unpacked."""
        self._free.append(slot)


class Parcel:
    """A part of a write that is under way as one: first written, then waited for until it is unpacked."""

    runs = 1

    def __init__(self, staging: Staging, bell: Bell, write: Transfer) -> None:
        self._staging = staging
        self._bell = bell
        self._write = write
        self._rang: float | None = None
        """When the bell rang last."""

    def over(self) -> bool:
        """Whether all of it is in its pool. Raises NIXL's errors, TransportFailed where it was refused."""
        now = time.monotonic()
        if self._rang is None:
            if not self._write.over():
                return False
            self._rang = now
        said = self._staging.said(self._bell.slot)
        if said is None or said.number != self._bell.number:
            if now - self._rang > RING_SECONDS:
                self._rang = now
                self._staging.ring(self._bell)
            return False
        if said.refused:
            raise TransportFailed("the receiver can't unpack what was packed for it")
        self._staging.give_back(self._bell.slot)
        return True

    def release(self) -> None:
        """Lets go of what NIXL holds for it."""
        self._write.release()


def _row(address: int, nbytes: int) -> Rows:
    return rows(np.array([address]), np.array([nbytes]))
