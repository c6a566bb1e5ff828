# SPDX-License-Identifier: Apache-2.0
"""A receiving agent over some pools: what comes through it ends when it is closed."""

from __future__ import annotations

from collections.abc import Sequence

from kvpushd.memory.host import bytes_at
from kvpushd.mover.transport import notices
from kvpushd.mover.transport.agents import Agents, register
from kvpushd.mover.transport.base import Region
from kvpushd.mover.transport.notices import Bell, Hello, Notice, Welcome
from kvpushd.mover.transport.parcel import SLOT_BYTES, SLOTS, Dock


class Inlet:
    """What one peer may write to."""

    def __init__(self, agents: Agents, name: str, pools: Sequence[Region], packs: bool) -> None:
        """Makes an agent of that name for the pools and, with `packs`, for a dock. Raises NIXL's errors."""
        self._errors = agents.errors
        self._agent = agents.make(name, self)
        self._dock: Dock | None = None
        self._packer = ""
        """The one agent that packs for the dock."""
        regions = [(pool.address, pool.nbytes) for pool in pools]
        if packs:
            self._dock = Dock({pool.address: bytes_at(pool.address, pool.nbytes) for pool in pools})
            regions.append((self._dock.slots.address, self._dock.slots.nbytes))
        for address, nbytes in regions:
            register(self._agent, address, nbytes)
        self.registrations = len(regions)
        self.metadata: bytes = self._agent.get_agent_metadata()
        """What a sender needs to write to it."""

    def progress(self) -> None:
        """Takes in what has come, and unpacks what is a parcel."""
        for sender, messages in self._agent.get_new_notifs().items():
            for message in messages:
                notice = notices.read(message)
                if notice is not None and self._dock is not None:
                    self._hear(sender, notice, self._dock)

    def close(self) -> None:
        """Destroys the agent, to which nothing else refers, and then what parcels came to."""
        self._agent = None
        self._dock = None

    def _hear(self, sender: str, notice: Notice, dock: Dock) -> None:
        try:
            if isinstance(notice, Hello) and not self._packer:
                self._meet(sender, notice, dock)
            elif isinstance(notice, Bell) and sender == self._packer:
                unpacked = dock.rang(notice)
                if unpacked is not None:
                    self._agent.send_notif(sender, bytes(unpacked))
        except self._errors:
            # Who can't be answered waits in vain, and is cut off.
            return

    def _meet(self, sender: str, hello: Hello, dock: Dock) -> None:
        """Answers the one that packs for this dock from now on. Raises NIXL's errors."""
        if hello.token != notices.token_of(self.metadata):
            return
        loaded = self._agent.add_remote_agent(hello.metadata)
        if (loaded.decode() if isinstance(loaded, bytes) else loaded) != sender:
            return
        self._packer = sender
        welcome = Welcome(dock.slots.address, SLOTS, SLOT_BYTES)
        self._agent.send_notif(sender, bytes(welcome))
