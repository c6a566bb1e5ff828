# SPDX-License-Identifier: Apache-2.0
"""Bytes by NIXL and UCX: an agent for each inlet, which receives, and one for each outlet, which sends.

A receiving agent per inlet is what makes an inlet a fence: an agent's destruction closes its connections, and
those of no other. A sending agent per outlet is what lets one be cut: nothing else keeps NIXL from reading
the source of a write that it has begun. With a receiver that stood still, a write went on though its handle
was released and its agent forgotten; after the sending agent's destruction (60 ms) came only the 8 MB that
the sockets held. Agents are cheap (10 ms, 0.8 MB, 8 descriptors each), and have no progress thread: NIXL's
spins a whole core, idle or not, so the mover polls instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpush_client.events import Fault, Reason
from kvpushd.errors import ConfigError, Invalid, TransportFailed
from kvpushd.mover.transport import descriptors
from kvpushd.mover.transport.agents import Agents, register
from kvpushd.mover.transport.base import Completion, Handles, Region, Write
from kvpushd.mover.transport.inlet import Inlet
from kvpushd.mover.transport.outlet import Outlet

SWEEP_SECONDS = 0.01
"""After which agents that did not ring are looked at too, as one may be reached by a fabric that rings
nothing. Each costs 3 us, and there may be hundreds."""
RUNG_SWEEP_SECONDS = 0.1
"""The same where all fabrics that may be used ring."""
SLICE_SECONDS = 0.005
"""For which a poll goes on to begin what is next, where all ends at once."""
PACKED = frozenset({"tcp", "self"})
"""UCX's transports over which short runs are packed: all that the movers may use must be among them."""


class NixlTransport:
    """The contract of base.Transport over NIXL's UCX backend. UCX's settings come from the environment."""

    name = "nixl-ucx"

    def __init__(self, agent: str, agents: Callable[[], Agents] = Agents) -> None:
        """Sending agents are called `agent` and a number: that must be unique among all peers' agents.
        `agents` makes what makes them.

        Raises ConfigError where NIXL is not installed, or UCX can't begin with its settings.
        """
        self._agents = agents()
        self._name = agent
        self._packs = PACKED.issuperset(os.environ.get("UCX_TLS", "all").split(","))
        try:
            # Sends nothing: memory that can't be registered is refused before anything is sent from it.
            self._probe = self._agents.make(agent)
        except self._agents.errors as error:
            raise ConfigError(
                f"NIXL's UCX backend does not start ({error}): check UCX_TLS and UCX_NET_DEVICES"
            ) from error
        self._swept = 0.0
        self._sources: dict[bytes, tuple[Region, Any]] = {}
        self._inlets: dict[int, Inlet] = {}
        self._outlets: dict[int, Outlet] = {}
        self._writing: dict[int, Outlet] = {}
        """Those with writes in flight."""
        self._ended: list[Completion] = []

    def register(self, region: Region) -> None:
        """Registers a pool with all sending agents."""
        try:
            probed = register(self._probe, region.address, region.nbytes)
            self._sources[region.pool_id] = (region, probed)
            for outlet in self._outlets.values():
                outlet.register(region)
        except self._agents.errors as error:
            self.deregister(region.pool_id)
            raise TransportFailed(f"NIXL can't register {region.nbytes:,} bytes: {error}") from error

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        held = self._sources.pop(pool_id, None)
        if held is not None:
            self._probe.deregister_memory(held[1])
        for outlet in self._outlets.values():
            outlet.deregister(pool_id)

    def open_inlet(self, inlet_id: int, agent: str, pools: Sequence[Region]) -> bytes:
        """Makes a receiving agent and registers the pools with it."""
        if inlet_id in self._inlets:
            raise Invalid(f"inlet {inlet_id} is open already: use another id")
        try:
            inlet = Inlet(self._agents, agent, pools, self._packs)
        except self._agents.errors as error:
            detail = f"NIXL can't make the receiving agent {agent}: {error}{descriptors.shortage()}"
            raise TransportFailed(detail) from error
        self._inlets[inlet_id] = inlet
        return inlet.metadata

    def close_inlet(self, inlet_id: int) -> None:
        """Destroys the receiving agent, here and now."""
        inlet = self._inlets.pop(inlet_id, None)
        if inlet is not None:
            inlet.close()

    def open_outlet(self, outlet_id: int, agent: str, metadata: bytes, pools: Sequence[Region]) -> None:
        """Makes a sending agent, loads the metadata and begins to connect."""
        if outlet_id in self._outlets:
            raise Invalid(f"outlet {outlet_id} is open already: use another id")
        doing = "make a sending agent"
        try:
            outlet = Outlet(self._agents, f"{self._name}/{outlet_id}")
            doing = "register memory"
            for region, _ in self._sources.values():
                outlet.register(region)
            doing = "read the metadata"
            outlet.meet(agent, metadata, {region.pool_id: region.address for region in pools})
            doing = "connect"
            outlet.connect(self._packs)
        except self._agents.errors as error:
            raise TransportFailed(
                f"NIXL can't {doing} for agent {agent}: {error}{descriptors.shortage()}"
            ) from error
        self._outlets[outlet_id] = outlet

    def close_outlet(self, outlet_id: int) -> None:
        """Destroys the sending agent, at once or with its last write."""
        outlet = self._outlets.get(outlet_id)
        if outlet is None:
            return
        outlet.closing = True
        if not outlet.in_flight:
            self.cut_outlet(outlet_id)

    def cut_outlet(self, outlet_id: int) -> None:
        """Destroys the sending agent, here and now."""
        outlet = self._outlets.pop(outlet_id, None)
        if outlet is None:
            return
        self._writing.pop(outlet_id, None)
        # What has ended since the last poll is still to be given out.
        self._ended += outlet.ended
        fault = Fault(Reason.TRANSPORT_FAILED, f"the way to agent {outlet.agent} was cut")
        self._ended += [Completion(write_id, fault) for write_id in outlet.close()]

    def post(self, write: Write) -> None:
        """Begins the write, or lets it wait for those to the same outlet that were posted before it."""
        outlet, source = self._way_of(write)
        outlet.post(write, source)
        self._writing[write.outlet_id] = outlet

    def inspect(self, write: Write) -> None:
        """Asks the other side for a checksum of what has landed."""
        outlet, source = self._way_of(write)
        outlet.inspect(write, source)
        self._writing[write.outlet_id] = outlet

    def _way_of(self, write: Write) -> tuple[Outlet, Region]:
        outlet = self._outlets.get(write.outlet_id)
        if outlet is None or outlet.closing:
            raise Invalid(f"outlet {write.outlet_id} is not open: open it before writing")
        if write.source_pool not in self._sources:
            raise Invalid(
                f"pool {write.source_pool.hex()} is not mapped in this mover: map it before writing"
            )
        return outlet, self._sources[write.source_pool][0]

    def poll(self) -> list[Completion]:
        """Asks after each part that is under way, which is also what makes progress with them."""
        until = time.monotonic() + SLICE_SECONDS
        for outlet_id, outlet in list(self._writing.items()):
            # CMA copies as it begins: what was just begun has ended.
            while outlet.moved_on() and time.monotonic() < until:
                continue
            self._ended += outlet.ended
            outlet.ended.clear()
            if not outlet.in_flight:
                del self._writing[outlet_id]
                if outlet.closing:
                    self.close_outlet(outlet_id)
        done, self._ended = self._ended, []
        return done

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        writing = self._writing.values()
        return sum(outlet.in_flight + len(outlet.ended) for outlet in writing) + len(self._ended)

    def progress(self) -> None:
        """Lets the agents that rang take in what has come; and from time to time all, of which one may be
        reached by a fabric that rings nothing."""
        now = time.monotonic()
        if now - self._swept < (RUNG_SWEEP_SECONDS if self._packs else SWEEP_SECONDS):
            for owner in self._agents.rung():
                owner.progress()
            return
        self._swept = now
        for outlet in self._outlets.values():
            outlet.progress()
        for inlet in self._inlets.values():
            inlet.progress()

    def handles(self) -> Handles:
        """Of all agents."""
        outlets = self._outlets.values()
        registered = len(self._sources) + sum(outlet.registrations for outlet in outlets)
        registered += sum(inlet.registrations for inlet in self._inlets.values())
        return Handles(len(outlets), sum(outlet.transfers for outlet in outlets), registered)

    def close(self) -> None:
        """Destroys all agents, receiving ones first."""
        for inlet in self._inlets.values():
            inlet.close()
        for outlet in self._outlets.values():
            outlet.close()
        self._inlets.clear()
        self._outlets.clear()
        self._writing.clear()
        self._sources.clear()
        del self._probe
        self._agents.close()

    @property
    def bell(self) -> int | None:
        """Of all agents, see there."""
        return self._agents.bell
