# SPDX-License-Identifier: Apache-2.0
"""A receiving agent over some pools: what comes through it ends when it is closed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from kvpushd.errors import BadMemory
from kvpushd.memory.host import Mapping, anonymous, bytes_at
from kvpushd.mover.transport import notices
from kvpushd.mover.transport.agents import Agents, name_of, register
from kvpushd.mover.transport.base import Region
from kvpushd.mover.transport.inspection import inspected
from kvpushd.mover.transport.notices import Bell, Hello, Inspect, Notice, Welcome
from kvpushd.mover.transport.parcel import SLOT_BYTES, SLOTS, SLOTS_BYTES, Dock, Slots

DOCKS = 8
"""Agents of the peer, one after another, that may pack. Each has a dock of its own: what one has sent that is
gone may still come, and must not come upon what the next one sends. One that nobody uses takes no memory."""
MOST_HELLOS = 64
"""Agents that may be answered. Each takes a connection."""
TRY_SECONDS = 0.25
"""After which it is tried again to reach one that could not be: descriptors may have been short."""


class Inlet:
    """What one peer may write to."""

    def __init__(self, agents: Agents, name: str, pools: Sequence[Region], packs: bool) -> None:
        """Makes an agent of that name for the pools and, with `packs`, for docks. Raises NIXL's errors."""
        self._agents = agents
        self._errors = agents.errors
        self._agent = agents.make(name, self)
        self._pools = {pool.address: bytes_at(pool.address, pool.nbytes) for pool in pools}
        self._docks: Mapping | None = None
        self._met: dict[str, Dock | None] = {}
        """The agents that are answered, and where each one's parcels come to."""
        self._tried: dict[str, float] = {}
        """Who said hello, and when it was last tried to reach them."""
        regions = [(pool.address, pool.nbytes) for pool in pools]
        if packs:
            with contextlib.suppress(BadMemory):  # without docks, runs come as they are
                self._docks = anonymous(DOCKS * SLOTS_BYTES)
                regions.append((self._docks.address, self._docks.nbytes))
        for address, nbytes in regions:
            register(self._agent, address, nbytes)
        self.registrations = len(pools)
        """Of pools. That of the docks lives as long as the inlet."""
        self.metadata: bytes = self._agent.get_agent_metadata()
        """What a sender needs to write to it."""

    def progress(self) -> None:
        """Takes in what has come, unpacks what is parcels, and answers."""
        answered: set[object] = set()
        for sender, notice in self._agents.heard(self._agent):
            # A slot's bell counts once, and one inspection is asked for at a time: who says more than
            # that keeps the mover from no one else.
            what = (sender, notice.slot if isinstance(notice, Bell) else type(notice))
            if what not in answered:
                answered.add(what)
                self._hear(sender, notice)

    def close(self) -> None:
        """Destroys the agent, to which nothing else refers, and then what parcels came to."""
        self._agent = None
        self._met.clear()
        self._pools = {}
        self._docks = None

    def _hear(self, sender: str, notice: Notice) -> None:
        answer: Notice | None = None
        dock = self._met.get(sender)
        match notice:
            case Hello():
                answer = self._meet(sender, notice)
            case Bell() if dock is not None:
                answer = dock.rang(notice)
            case Inspect() if sender in self._met:
                answer = inspected(notice, self._pools)
        if answer is not None:
            with contextlib.suppress(*self._errors):  # who can't be answered asks again, or is cut off
                self._agents.tell(self._agent, sender, answer)

    def _meet(self, sender: str, hello: Hello) -> Welcome | None:
        """Lets an agent that has the token be answered, and welcomes it to a dock if there is one left."""
        if hello.token != notices.token_of(self.metadata):
            return None
        if sender not in self._met:
            if not self._may_try(sender) or not self._reaches(sender, hello.metadata):
                return None
            slots = len(self._met) * SLOTS_BYTES
            self._met[sender] = None
            if self._docks is not None and slots < self._docks.nbytes:
                self._met[sender] = Dock(Slots(self._docks, slots), self._pools)
        dock = self._met[sender]
        return None if dock is None else Welcome(dock.slots.address, SLOTS, SLOT_BYTES)

    def _may_try(self, sender: str) -> bool:
        """Of so many agents, each not all the time: what it says may be nonsense each time."""
        now = time.monotonic()
        if sender in self._tried:
            may = now - self._tried[sender] >= TRY_SECONDS
        else:
            may = len(self._tried) < MOST_HELLOS
        if may:
            self._tried[sender] = now
        return may

    def _reaches(self, sender: str, metadata: bytes) -> bool:
        """Whether an agent's metadata is its own: it may be anything."""
        try:
            loaded = name_of(self._agent.add_remote_agent(metadata))
            if loaded != sender:
                self._agent.remove_remote_agent(loaded)
        except Exception:  # noqa: BLE001 - NIXL and its bindings raise what they like
            return False
        return loaded == sender
