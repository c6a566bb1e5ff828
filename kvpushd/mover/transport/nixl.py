# SPDX-License-Identifier: Apache-2.0
"""Bytes by NIXL and UCX: an agent for each inlet, which receives, and one for each outlet, which sends.

A receiving agent per inlet is what makes an inlet a fence: an agent's destruction closes its connections, and
those of no other. A sending agent per outlet is what lets one be cut: nothing else keeps NIXL from reading
the source of a write that it has begun. With a receiver that stood still, a write went on though its handle
was released and its agent forgotten; after the sending agent's destruction (60 ms) came only the 8 MB that
the sockets held. Agents are cheap (10 ms, 0.8 MB, 8 descriptors each), and have no progress thread: NIXL's
spins a whole core, idle or not, so the mover polls instead.

The packages nixl_cu12 and nixl_cu13 are imported by name, whichever is installed, and not through `nixl`:
that one looks for CUDA by importing torch, which takes 2 s and 190 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Runs
from kvpushd.errors import ConfigError, Invalid, TransportFailed
from kvpushd.mover.transport import descriptors
from kvpushd.mover.transport.base import Completion, Handles, Region, Write
from kvpushd.mover.transport.parts import PART_RUNS, parts_of, rows

PACKAGES = ("nixl_cu13", "nixl_cu12")
_DRAM = "DRAM"

STREAK_SECONDS = 0.25
"""How long an outlet goes on without a pause, in which all that is under way has ended.

NIXL's progress goes on as long as there is more to take in. Where a receiver is slower than its sender, it
does not come back while bytes come: two senders kept a mover from its commands, beats and fences for seconds.
In a pause there is nothing to take in, and a link of 176 MB/s is idle for 1 to 2 ms. The limit of runs is for
those of a few KiB, which keep a receiver busy for much longer than their sender."""
SWEEP_SECONDS = 0.01
"""After which agents that did not ring are looked at too. Each costs 3 us, and there may be hundreds."""
SLICE_SECONDS = 0.005
"""For which a poll goes on to begin what is next, where all ends at once."""


@dataclass(slots=True)
class _Outlet:
    """The way to another process's receiving agent, from a sending agent of its own."""

    sender: Any
    agent: str
    addresses: dict[bytes, int]
    sources: dict[bytes, Any] = field(default_factory=dict)
    """What is registered with the sender."""
    writes: dict[int, _InFlight] = field(default_factory=dict)
    """In the order in which they were posted, and begin."""
    under_way: list[_Part] = field(default_factory=list)
    busy_since: float = 0.0
    closing: bool = False


@dataclass(slots=True)
class _InFlight:
    """A posted write: what of it is to be begun, and how many parts are under way."""

    source: int
    target: int
    operation: str
    parts: deque[Runs]
    under_way: int = 0
    fault: Fault | None = None


@dataclass(slots=True, eq=False)
class _Part:
    """Some runs of a write that are under way, and what must live meanwhile."""

    write_id: int
    runs: int
    transfer: Any
    lists: tuple[Any, Any]


@dataclass(slots=True)
class _Inlet:
    agent: Any
    registrations: list[Any] = field(default_factory=list)


class NixlTransport:
    """The contract of base.Transport over NIXL's UCX backend. UCX's settings come from the environment."""

    name = "nixl-ucx"

    def __init__(self, agent: str) -> None:
        """Sending agents are called `agent` and a number: that must be unique among all peers' agents.

        Raises ConfigError where NIXL is not installed, or UCX can't begin with its settings.
        """
        self._nixl = _package()
        self._bell = select.epoll()
        self._rings: dict[int, weakref.ref[Any]] = {}
        """By descriptor, the agent that rings it."""
        self._swept = 0.0
        bindings = importlib.import_module(f"{self._nixl.__name__}._bindings")
        # NIXL's exceptions have no base but Exception.
        self._errors: tuple[type[Exception], ...] = tuple(
            value
            for name, value in vars(bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        )
        self._name = agent
        try:
            # Sends nothing: memory that can't be registered is refused before anything is sent from it.
            self._probe = self._make_agent(agent)
        except self._errors as error:
            raise ConfigError(
                f"NIXL's UCX backend does not start ({error}): check UCX_TLS and UCX_NET_DEVICES"
            ) from error
        self._sources: dict[bytes, tuple[Region, Any]] = {}
        self._inlets: dict[int, _Inlet] = {}
        self._outlets: dict[int, _Outlet] = {}
        self._writing: dict[int, _Outlet] = {}
        """Those with writes in flight."""
        self._ended: list[Completion] = []

    def register(self, region: Region) -> None:
        """Registers a pool with all sending agents."""
        try:
            self._sources[region.pool_id] = (region, self._register(self._probe, region))
            for outlet in self._outlets.values():
                outlet.sources[region.pool_id] = self._register(outlet.sender, region)
        except self._errors as error:
            self.deregister(region.pool_id)
            raise TransportFailed(f"NIXL can't register {region.nbytes:,} bytes: {error}") from error

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        held = self._sources.pop(pool_id, None)
        if held is not None:
            self._probe.deregister_memory(held[1])
        for outlet in self._outlets.values():
            registered = outlet.sources.pop(pool_id, None)
            if registered is not None:
                outlet.sender.deregister_memory(registered)

    def open_inlet(self, inlet_id: int, agent: str, pools: Sequence[Region]) -> bytes:
        """Makes a receiving agent and registers the pools with it."""
        if inlet_id in self._inlets:
            raise Invalid(f"inlet {inlet_id} is open already: use another id")
        try:
            inlet = _Inlet(self._make_agent(agent))
            inlet.registrations.extend(self._register(inlet.agent, region) for region in pools)
            metadata: bytes = inlet.agent.get_agent_metadata()
        except self._errors as error:
            detail = f"NIXL can't make the receiving agent {agent}: {error}{descriptors.shortage()}"
            raise TransportFailed(detail) from error
        self._inlets[inlet_id] = inlet
        return metadata

    def close_inlet(self, inlet_id: int) -> None:
        """Destroys the receiving agent, here and now: nothing else refers to it."""
        inlet = self._inlets.pop(inlet_id, None)
        del inlet

    def open_outlet(self, outlet_id: int, agent: str, metadata: bytes, pools: Sequence[Region]) -> None:
        """Makes a sending agent, loads the metadata and begins to connect."""
        if outlet_id in self._outlets:
            raise Invalid(f"outlet {outlet_id} is open already: use another id")
        doing = "make a sending agent"
        try:
            sender = self._make_agent(f"{self._name}/{outlet_id}")
            doing = "register memory"
            sources = {key: self._register(sender, region) for key, (region, _) in self._sources.items()}
            doing = "read the metadata"
            loaded = sender.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            if name != agent:
                raise Invalid(f"the metadata is of agent {name}, expected {agent}")
            doing = "connect"
            sender.make_connection(agent)
        except self._errors as error:
            raise TransportFailed(
                f"NIXL can't {doing} for agent {agent}: {error}{descriptors.shortage()}"
            ) from error
        addresses = {region.pool_id: region.address for region in pools}
        self._outlets[outlet_id] = _Outlet(sender, agent, addresses, sources)

    def close_outlet(self, outlet_id: int) -> None:
        """Destroys the sending agent, at once or with its last write."""
        outlet = self._outlets.get(outlet_id)
        if outlet is None:
            return
        outlet.closing = True
        if not outlet.writes:
            del self._outlets[outlet_id]

    def cut_outlet(self, outlet_id: int) -> None:
        """Destroys the sending agent, here and now: nothing else refers to it."""
        outlet = self._outlets.pop(outlet_id, None)
        if outlet is None:
            return
        self._writing.pop(outlet_id, None)
        fault = Fault(Reason.TRANSPORT_FAILED, f"the way to agent {outlet.agent} was cut")
        self._ended += [Completion(write_id, fault) for write_id in outlet.writes]
        del outlet

    def post(self, write: Write) -> None:
        """Begins the write, or lets it wait for those to the same outlet that were posted before it."""
        outlet = self._outlets.get(write.outlet_id)
        if outlet is None or outlet.closing:
            raise Invalid(f"outlet {write.outlet_id} is not open: open it before writing")
        if write.source_pool not in self._sources:
            raise Invalid(
                f"pool {write.source_pool.hex()} is not mapped in this mover: map it before writing"
            )
        if write.target_pool not in outlet.addresses:
            raise Invalid(f"pool {write.target_pool.hex()} is not behind outlet {write.outlet_id}")
        source = self._sources[write.source_pool][0].address
        target = outlet.addresses[write.target_pool]
        operation = "READ" if write.back else "WRITE"
        outlet.writes[write.write_id] = _InFlight(source, target, operation, parts_of(write.runs))
        self._writing[write.outlet_id] = outlet
        self._begin(outlet)

    def poll(self) -> list[Completion]:
        """Asks after each part that is under way, 3 us each, which is also what makes progress with them."""
        until = time.monotonic() + SLICE_SECONDS
        for outlet_id, outlet in list(self._writing.items()):
            # CMA copies as it begins: what was just begun has ended.
            while self._moved_on(outlet) and time.monotonic() < until:
                continue
            if not outlet.writes:
                del self._writing[outlet_id]
                if outlet.closing:
                    self.close_outlet(outlet_id)
        done, self._ended = self._ended, []
        return done

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        return sum(len(outlet.writes) for outlet in self._writing.values()) + len(self._ended)

    def progress(self) -> None:
        """Lets the agents that rang take in what has come; and from time to time all, of which one may be
        reached by a fabric that rings nothing."""
        now = time.monotonic()
        if now - self._swept >= SWEEP_SECONDS:
            self._swept = now
            for outlet in self._outlets.values():
                outlet.sender.get_new_notifs()
            for inlet in self._inlets.values():
                inlet.agent.get_new_notifs()
            return
        for descriptor, _ in self._bell.poll(0):
            agent = self._rings[descriptor]()
            if agent is not None:
                agent.get_new_notifs()

    def handles(self) -> Handles:
        """Of all agents."""
        outlets = self._outlets.values()
        registered = len(self._sources) + sum(len(outlet.sources) for outlet in outlets)
        registered += sum(len(inlet.registrations) for inlet in self._inlets.values())
        return Handles(len(outlets), sum(len(outlet.under_way) for outlet in outlets), registered)

    def close(self) -> None:
        """Destroys all agents, receiving ones first."""
        self._inlets.clear()
        self._outlets.clear()
        self._writing.clear()
        self._sources.clear()
        del self._probe
        self._bell.close()

    @property
    def bell(self) -> int | None:
        """Readable while a TCP connection of an agent's is.

        NIXL has no call that waits. But an agent's UCX watches its connections by an epoll descriptor, level
        triggered, and such a descriptor can itself be waited for. Other fabrics than TCP don't ring it.
        """
        return self._bell.fileno()

    def _make_agent(self, name: str) -> Any:
        before = set(descriptors.names())
        agent = self._nixl.nixl_agent(name, self._nixl.nixl_agent_config(enable_prog_thread=False))
        for descriptor in descriptors.epolls(set(descriptors.names()) - before):
            # It leaves the bell by itself when the agent closes it.
            self._bell.register(descriptor, select.EPOLLIN)
            self._rings[descriptor] = weakref.ref(agent)
        return agent

    def _moved_on(self, outlet: _Outlet) -> bool:
        """Whether some of what is under way to an outlet was found to have ended; begins what comes next."""
        moved = False
        for part in list(outlet.under_way):
            flight = outlet.writes[part.write_id]
            try:
                if outlet.sender.check_xfer_state(part.transfer) == "PROC":
                    continue
            except self._errors as error:
                self._fail(outlet, flight, error)
            moved = True
            outlet.under_way.remove(part)
            flight.under_way -= 1
            self._release(part.transfer, *part.lists)
            self._settle(outlet, part.write_id)
        if moved:
            self._begin(outlet)
        return moved

    def _begin(self, outlet: _Outlet) -> None:
        """Begins as many parts of an outlet's writes as may be under way."""
        now = time.monotonic()
        for write_id, flight in list(outlet.writes.items()):
            while flight.parts:
                if not outlet.under_way:
                    outlet.busy_since = now
                elif (
                    sum(part.runs for part in outlet.under_way) + len(flight.parts[0].length) > PART_RUNS
                    or now - outlet.busy_since > STREAK_SECONDS
                ):
                    return
                self._begin_part(outlet, write_id, flight)
            self._settle(outlet, write_id)

    def _begin_part(self, outlet: _Outlet, write_id: int, flight: _InFlight) -> None:
        """Begins the next part of a write. Where it can't be, the write has failed.

        Lists made for this part alone: 0.1 ms for hundreds of runs. Prepared ones, kept per pool, would save
        that only where all runs have one length, which merging undoes.
        """
        runs = flight.parts.popleft()
        index = np.arange(len(runs.length), dtype=np.int32)
        near_rows = rows(runs.source + flight.source, runs.length)
        far_rows = rows(runs.target + flight.target, runs.length)
        made: list[Any] = []
        try:
            made.append(outlet.sender.prep_xfer_dlist("", near_rows, _DRAM))
            made.append(outlet.sender.prep_xfer_dlist(outlet.agent, far_rows, _DRAM))
            transfer = outlet.sender.make_prepped_xfer(flight.operation, made[0], index, made[1], index)
            made.append(transfer)
            outlet.sender.transfer(transfer)
        except self._errors as error:
            self._release(*reversed(made))
            self._fail(outlet, flight, error)
            return
        outlet.under_way.append(_Part(write_id, len(index), transfer, (made[0], made[1])))
        flight.under_way += 1

    def _fail(self, outlet: _Outlet, flight: _InFlight, error: Exception) -> None:
        """A part of a write failed: what of it is not begun never is. It ends once nothing is under way."""
        flight.parts.clear()
        detail = f"the write to agent {outlet.agent} failed ({type(error).__name__}: {error})"
        flight.fault = flight.fault or Fault(Reason.TRANSPORT_FAILED, detail)

    def _settle(self, outlet: _Outlet, write_id: int) -> None:
        """Gives a write's completion to the next poll, if it has ended."""
        flight = outlet.writes[write_id]
        if flight.parts or flight.under_way:
            return
        del outlet.writes[write_id]
        self._ended.append(Completion(write_id, flight.fault))

    def _register(self, agent: Any, region: Region) -> Any:
        return agent.register_memory([(region.address, region.nbytes, 0, "")], _DRAM)

    def _release(self, *handles: Any) -> None:
        for handle in handles:
            try:
                handle.release()
            except self._errors:
                # The connection broke, and the agent holds on to the handle until it is destroyed.
                continue


def _package() -> Any:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ConfigError(f"NIXL is not installed, expected one of {', '.join(PACKAGES)}: pip install nixl")
