# SPDX-License-Identifier: Apache-2.0
"""A receiving agent over some pools: what comes through it ends when it is closed."""

from __future__ import annotations

from collections.abc import Sequence

from kvpushd.memory.host import Mapping, anonymous, bytes_at
from kvpushd.mover.transport import notices
from kvpushd.mover.transport.agents import Agents, register
from kvpushd.mover.transport.base import Region
from kvpushd.mover.transport.inspection import inspected
from kvpushd.mover.transport.notices import Bell, Hello, Inspect, Notice, Welcome
from kvpushd.mover.transport.parcel import SLOT_BYTES, SLOTS, SLOTS_BYTES, Dock, Slots

MOST_MET = 8
"""Agents of the peer, one after another, that may be answered. Each has a dock of its own: what one has sent
that is gone may still come, and must not come upon what the next one sends. A dock that nobody uses takes up
no memory."""


class Inlet:
    """What one peer may write to."""

    def __init__(self, agents: Agents, name: str, pools: Sequence[Region], packs: bool) -> None:
        """Makes an agent of that name for the pools and, with `packs`, for docks. Raises NIXL's errors."""
        self._errors = agents.errors
        self._agent = agents.make(name, self)
        self._pools = {pool.address: bytes_at(pool.address, pool.nbytes) for pool in pools}
        self._docks: Mapping | None = None
        self._met: dict[str, Dock | None] = {}
        """The agents that are answered, and where each one's parcels come to."""
        regions = [(pool.address, pool.nbytes) for pool in pools]
        if packs:
            self._docks = anonymous(MOST_MET * SLOTS_BYTES)
            regions.append((self._docks.address, self._docks.nbytes))
        for address, nbytes in regions:
            register(self._agent, address, nbytes)
        self.registrations = len(pools)
        """Of pools. That of the docks lives as long as the inlet."""
        self.metadata: bytes = self._agent.get_agent_metadata()
        """What a sender needs to write to it."""

    def progress(self) -> None:
        """Takes in what has come, unpacks what is a parcel, and answers."""
        for sender, messages in self._agent.get_new_notifs().items():
            inspects = 0
            for notice in map(notices.read, messages):
                if isinstance(notice, Inspect):
                    # One is asked for at a time: who asks for more does not keep the mover from others.
                    inspects += 1
                    if inspects > 1:
                        continue
                try:
                    self._hear(sender, notice)
                except self._errors:
                    # Who can't be answered waits in vain, and is cut off.
                    continue

    def close(self) -> None:
        """Destroys the agent, to which nothing else refers, and then what parcels came to."""
        self._agent = None
        self._met.clear()
        self._pools = {}
        self._docks = None

    def _hear(self, sender: str, notice: Notice | None) -> None:
        """Raises NIXL's errors."""
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
            self._agent.send_notif(sender, bytes(answer))

    def _meet(self, sender: str, hello: Hello) -> Welcome | None:
        """Lets an agent that has the token be answered, and welcomes it to a dock if there are any."""
        if hello.token != notices.token_of(self.metadata):
            return None
        if sender in self._met or len(self._met) == MOST_MET:
            return None
        loaded = self._agent.add_remote_agent(hello.metadata)
        if (loaded.decode() if isinstance(loaded, bytes) else loaded) != sender:
            return None
        if self._docks is None:
            self._met[sender] = None
            return None
        slots = Slots(self._docks, len(self._met) * SLOTS_BYTES)
        self._met[sender] = Dock(slots, self._pools)
        return Welcome(slots.address, SLOTS, SLOT_BYTES)
