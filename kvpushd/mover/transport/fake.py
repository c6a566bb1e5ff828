# SPDX-License-Identifier: Apache-2.0
"""The contract of base.Transport in one process's memory, with faults on demand. For tests."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpush_client.events import Fault, Reason
from kvpushd.errors import Invalid, TransportFailed
from kvpushd.mover.transport.base import Completion, Handles, Region, Write
from kvpushd.mover.transport.checksum import differs
from kvpushd.mover.transport.copying import memmove


@dataclass(slots=True)
class _Inlet:
    """A receiving agent: what is behind it, and whether it was destroyed."""

    pools: dict[bytes, Region]
    open: bool = True


@dataclass(slots=True)
class _Outlet:
    agent: str
    addresses: dict[bytes, int]
    writes: int = 0
    closing: bool = False


@dataclass(slots=True)
class _InFlight:
    write: Write
    polls: int
    fault: Fault | None = field(default=None)
    inspects: bool = False


class FakeFabric:
    """What connects the fake transports of a process. Any thread may ask it for a fault."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inlets: dict[str, _Inlet] = {}
        self.failing = 0
        self.hanging = False
        self.polls = 0
        self.cut: set[str] = set()

    def fail(self, writes: int = 1) -> None:
        """The next writes to be posted end with a fault, and land nothing."""
        with self.lock:
            self.failing = writes

    def hang(self) -> None:
        """No write ends, until `go_on`: as behind a link that is down."""
        with self.lock:
            self.hanging = True

    def go_on(self) -> None:
        """Undoes `hang`."""
        with self.lock:
            self.hanging = False

    def delay(self, polls: int) -> None:
        """Writes posted from now on land only with their sender's n-th poll."""
        with self.lock:
            self.polls = polls

    def disconnect(self, agent: str) -> None:
        """Writes to this agent end with a fault from now on."""
        with self.lock:
            self.cut.add(agent)


class FakeTransport:
    """Lands a write when its sender polls, if the inlet is still open; keeps all that base.py promises."""

    name = "fake"

    def __init__(self, fabric: FakeFabric) -> None:
        self._fabric = fabric
        self._sources: dict[bytes, Region] = {}
        self._inlets: dict[int, str] = {}
        self._outlets: dict[int, _Outlet] = {}
        self._writes: dict[int, _InFlight] = {}
        self._cut: list[Completion] = []
        self._copy = memmove()

    def register(self, region: Region) -> None:
        """Makes a pool a possible source."""
        self._sources[region.pool_id] = region

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        self._sources.pop(pool_id, None)

    def open_inlet(self, inlet_id: int, agent: str, pools: Sequence[Region]) -> bytes:
        """Names an inlet in the fabric."""
        if inlet_id in self._inlets:
            raise Invalid(f"inlet {inlet_id} is open already: use another id")
        with self._fabric.lock:
            if agent in self._fabric.inlets:
                raise TransportFailed(f"an agent {agent} exists already: names are for ever")
            self._fabric.inlets[agent] = _Inlet({region.pool_id: region for region in pools})
        self._inlets[inlet_id] = agent
        return agent.encode()

    def close_inlet(self, inlet_id: int) -> None:
        """The lock that landing takes makes it a fence."""
        agent = self._inlets.pop(inlet_id, None)
        if agent is not None:
            with self._fabric.lock:
                self._fabric.inlets[agent].open = False

    def open_outlet(self, outlet_id: int, agent: str, metadata: bytes, pools: Sequence[Region]) -> None:
        """Remembers it."""
        if outlet_id in self._outlets:
            raise Invalid(f"outlet {outlet_id} is open already: use another id")
        if metadata != agent.encode():
            raise Invalid(f"the metadata is not that of agent {agent}")
        self._outlets[outlet_id] = _Outlet(agent, {region.pool_id: region.address for region in pools})

    def close_outlet(self, outlet_id: int) -> None:
        """Forgets it, with its last write."""
        outlet = self._outlets.get(outlet_id)
        if outlet is not None:
            outlet.closing = True
            if outlet.writes == 0:
                del self._outlets[outlet_id]

    def cut_outlet(self, outlet_id: int) -> None:
        """Forgets it; the next poll ends its writes."""
        outlet = self._outlets.pop(outlet_id, None)
        if outlet is not None:
            fault = Fault(Reason.TRANSPORT_FAILED, f"the way to agent {outlet.agent} was cut")
            mine = [key for key, flight in self._writes.items() if flight.write.outlet_id == outlet_id]
            self._cut += [Completion(write_id, fault) for write_id in mine]
            for write_id in mine:
                del self._writes[write_id]

    def post(self, write: Write) -> None:
        """Queues it, with the fault that is due."""
        outlet = self._outlets.get(write.outlet_id)
        if outlet is None or outlet.closing:
            raise Invalid(f"outlet {write.outlet_id} is not open: open it before writing")
        if write.source_pool not in self._sources or write.target_pool not in outlet.addresses:
            raise Invalid("source or target pool is not known here")
        with self._fabric.lock:
            flight = _InFlight(write, self._fabric.polls)
            if self._fabric.failing > 0:
                self._fabric.failing -= 1
                flight.fault = Fault(Reason.TRANSPORT_FAILED, "failed on demand")
        outlet.writes += 1
        self._writes[write.write_id] = flight

    def inspect(self, write: Write) -> None:
        """Queues an inspection, as a write."""
        self.post(write)
        self._writes[write.write_id].inspects = True

    def poll(self) -> list[Completion]:
        """Lands what is due."""
        done = []
        with self._fabric.lock:
            for write_id, flight in list(self._writes.items()):
                outlet = self._outlets[flight.write.outlet_id]
                inlet = self._fabric.inlets.get(outlet.agent)
                flight.polls -= 1
                if inlet is None or not inlet.open or outlet.agent in self._fabric.cut:
                    flight.fault = Fault(Reason.TRANSPORT_FAILED, f"agent {outlet.agent} is gone")
                elif self._fabric.hanging or flight.polls >= 0:
                    continue
                elif flight.fault is None:
                    flight.fault = self._land(flight, outlet)
                done.append(Completion(write_id, flight.fault))
        for completion in done:
            flight = self._writes.pop(completion.write_id)
            outlet = self._outlets[flight.write.outlet_id]
            outlet.writes -= 1
            if outlet.closing:
                self.close_outlet(flight.write.outlet_id)
        cut, self._cut = self._cut, []
        return done + cut

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        return len(self._writes) + len(self._cut)

    def progress(self) -> None:
        """Nothing to do: the sender's poll lands."""

    def handles(self) -> Handles:
        """As if each agent had registered what it reaches."""
        with self._fabric.lock:
            behind = sum(len(self._fabric.inlets[agent].pools) for agent in self._inlets.values())
        registered = len(self._sources) * (1 + len(self._outlets)) + behind
        return Handles(len(self._outlets), len(self._writes), registered)

    @property
    def bell(self) -> int | None:
        """None."""
        return None

    def close(self) -> None:
        """Fences its inlets, forgets the rest."""
        for inlet_id in list(self._inlets):
            self.close_inlet(inlet_id)
        self._writes.clear()
        self._outlets.clear()
        self._sources.clear()

    def _land(self, flight: _InFlight, outlet: _Outlet) -> Fault | None:
        """Copies, or compares."""
        runs = flight.write.runs
        source = self._sources[flight.write.source_pool].address
        target = outlet.addresses[flight.write.target_pool]
        sources, targets = (runs.source + source).tolist(), (runs.target + target).tolist()
        for begin, to, length in zip(sources, targets, runs.length.tolist(), strict=True):
            if not flight.inspects:
                self._copy(to, begin, length)
            elif ctypes.string_at(to, length) != ctypes.string_at(begin, length):
                return differs(runs)
        return None
