# SPDX-License-Identifier: Apache-2.0
"""A receiving agent over some pools: what comes through it ends when it is closed."""

from __future__ import annotations

from collections.abc import Sequence

from kvpushd.memory.host import bytes_at
from kvpushd.mover.transport.agents import Agents, register
from kvpushd.mover.transport.base import Invitation, Region
from kvpushd.mover.transport.parcel import Dock


class Inlet:
    """What one peer may write to."""

    def __init__(self, agents: Agents, name: str, pools: Sequence[Region], packs: bool) -> None:
        """Makes an agent of that name for the pools and, with `packs`, for a dock. Raises NIXL's errors."""
        self._agent = agents.make(name, self)
        self._dock: Dock | None = None
        regions = [(pool.address, pool.nbytes) for pool in pools]
        if packs:
            self._dock = Dock({pool.pool_id: bytes_at(pool.address, pool.nbytes) for pool in pools})
            regions.append((self._dock.slots.address, self._dock.slots.nbytes))
        for address, nbytes in regions:
            register(self._agent, address, nbytes)
        self.registrations = len(regions)
        landing = self._dock.slots.landing if self._dock is not None else None
        self.invitation = Invitation(name, self._agent.get_agent_metadata(), landing)

    def progress(self) -> None:
        """Takes in what has come, and unpacks what is a parcel."""
        for messages in self._agent.get_new_notifs().values():
            if self._dock is not None:
                for message in messages:
                    self._dock.rang(message)

    def close(self) -> None:
        """Destroys the agent, to which nothing else refers, and then what parcels came to."""
        self._agent = None
        self._dock = None
