# SPDX-License-Identifier: Apache-2.0
"""Bytes by NIXL and UCX: one agent that sends, and one per inlet that receives.

A receiving agent per inlet is what makes an inlet a fence: an agent's destruction closes its connections, and
those of no other. Agents are cheap (10 ms, 0.8 MB, 8 descriptors each), and have no progress thread: NIXL's
spins a whole core, idle or not, so the mover polls instead.

The packages nixl_cu12 and nixl_cu13 are imported by name, whichever is installed, and not through `nixl`:
that one looks for CUDA by importing torch, which takes 2 s and 190 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpush_client.events import Fault, Reason
from kvpushd.errors import ConfigError, Invalid, TransportFailed
from kvpushd.mover.transport.base import Completion, Region, Write

PACKAGES = ("nixl_cu13", "nixl_cu12")
_DRAM = "DRAM"


@dataclass(slots=True)
class _Outlet:
    """The way to another process's receiving agent."""

    agent: str
    addresses: dict[bytes, int]
    writes: int = 0
    closing: bool = False


@dataclass(slots=True)
class _InFlight:
    """A posted write, and what must live until it is terminal."""

    outlet_id: int
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
        """Makes the sending agent, under a name that must be unique among all peers' agents.

        Raises ConfigError where NIXL is not installed, or UCX can't begin with its settings.
        """
        self._nixl = _package()
        bindings = importlib.import_module(f"{self._nixl.__name__}._bindings")
        # NIXL's exceptions have no base but Exception.
        self._errors: tuple[type[Exception], ...] = tuple(
            value
            for name, value in vars(bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        )
        try:
            self._sender = self._make_agent(agent)
        except self._errors as error:
            raise ConfigError(
                f"NIXL's UCX backend does not start ({error}): check UCX_TLS and UCX_NET_DEVICES"
            ) from error
        self._sources: dict[bytes, tuple[Region, Any]] = {}
        self._inlets: dict[int, _Inlet] = {}
        self._outlets: dict[int, _Outlet] = {}
        self._writes: dict[int, _InFlight] = {}
        self._failed: list[Completion] = []

    def register(self, region: Region) -> None:
        """Registers a pool with the sending agent."""
        try:
            self._sources[region.pool_id] = (region, self._register(self._sender, region))
        except self._errors as error:
            raise TransportFailed(f"NIXL can't register {region.nbytes:,} bytes: {error}") from error

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        held = self._sources.pop(pool_id, None)
        if held is not None:
            self._sender.deregister_memory(held[1])

    def open_inlet(self, inlet_id: int, agent: str, pools: Sequence[Region]) -> bytes:
        """Makes a receiving agent and registers the pools with it."""
        if inlet_id in self._inlets:
            raise Invalid(f"inlet {inlet_id} is open already: use another id")
        try:
            inlet = _Inlet(self._make_agent(agent))
            inlet.registrations.extend(self._register(inlet.agent, region) for region in pools)
            metadata: bytes = inlet.agent.get_agent_metadata()
        except self._errors as error:
            raise TransportFailed(f"NIXL can't make the receiving agent {agent}: {error}") from error
        self._inlets[inlet_id] = inlet
        return metadata

    def close_inlet(self, inlet_id: int) -> None:
        """Destroys the receiving agent, here and now: nothing else refers to it."""
        inlet = self._inlets.pop(inlet_id, None)
        del inlet

    def open_outlet(self, outlet_id: int, agent: str, metadata: bytes, pools: Sequence[Region]) -> None:
        """Loads the metadata and begins to connect."""
        if outlet_id in self._outlets:
            raise Invalid(f"outlet {outlet_id} is open already: use another id")
        try:
            loaded = self._sender.add_remote_agent(metadata)
        except self._errors as error:
            raise TransportFailed(f"NIXL can't read the metadata of agent {agent}: {error}") from error
        name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if name != agent:
            self._forget(name)
            raise Invalid(f"the metadata is of agent {name}, expected {agent}")
        try:
            self._sender.make_connection(agent)
        except self._errors as error:
            self._forget(name)
            raise TransportFailed(f"NIXL can't connect to agent {agent}: {error}") from error
        self._outlets[outlet_id] = _Outlet(agent, {region.pool_id: region.address for region in pools})

    def close_outlet(self, outlet_id: int) -> None:
        """Forgets the remote agent, at once or with its last write."""
        outlet = self._outlets.get(outlet_id)
        if outlet is None:
            return
        outlet.closing = True
        if outlet.writes == 0:
            del self._outlets[outlet_id]
            self._forget(outlet.agent)

    def post(self, write: Write) -> None:
        """Prepares the runs on both sides and begins the WRITE.

        Lists made for this write alone: 0.1 ms for hundreds of runs, 3 ms for 131k. Prepared ones, kept per
        pool, would save that only where all runs have one length, which merging undoes.
        """
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
        runs = write.runs
        index = np.arange(len(runs.length), dtype=np.int32)
        try:
            near = self._sender.prep_xfer_dlist("", _rows(runs.source + source, runs.length), _DRAM)
            far = self._sender.prep_xfer_dlist(outlet.agent, _rows(runs.target + target, runs.length), _DRAM)
            transfer = self._sender.make_prepped_xfer("WRITE", near, index, far, index)
            self._sender.transfer(transfer)
        except self._errors as error:
            self._failed.append(_failed(write.write_id, outlet.agent, error))
            return
        outlet.writes += 1
        self._writes[write.write_id] = _InFlight(write.outlet_id, transfer, (near, far))

    def poll(self) -> list[Completion]:
        """Asks after each write in flight, 3 us each, which is also what makes progress with them."""
        done, self._failed = self._failed, []
        for write_id, flight in list(self._writes.items()):
            outlet = self._outlets[flight.outlet_id]
            try:
                if self._sender.check_xfer_state(flight.transfer) == "PROC":
                    continue
                completion = Completion(write_id)
            except self._errors as error:
                completion = _failed(write_id, outlet.agent, error)
            del self._writes[write_id]
            self._release(flight)
            done.append(completion)
            outlet.writes -= 1
            if outlet.closing:
                self.close_outlet(flight.outlet_id)
        return done

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out."""
        return len(self._writes) + len(self._failed)

    def progress(self) -> None:
        """Lets each agent take in what has come, 3 us each."""
        self._sender.get_new_notifs()
        for inlet in self._inlets.values():
            inlet.agent.get_new_notifs()

    def close(self) -> None:
        """Destroys all agents, receiving ones first."""
        self._inlets.clear()
        self._writes.clear()
        self._outlets.clear()
        self._sources.clear()
        del self._sender

    def _make_agent(self, name: str) -> Any:
        return self._nixl.nixl_agent(name, self._nixl.nixl_agent_config(enable_prog_thread=False))

    def _register(self, agent: Any, region: Region) -> Any:
        return agent.register_memory([(region.address, region.nbytes, 0, "")], _DRAM)

    def _forget(self, agent: str) -> None:
        try:
            self._sender.remove_remote_agent(agent)
        except self._errors:
            # It is gone already: NIXL forgets an agent whose connection broke.
            return

    def _release(self, flight: _InFlight) -> None:
        for release in (flight.transfer.release, *(handle.release for handle in flight.lists)):
            try:
                release()
            except self._errors:
                # The connection broke, and the agent holds on to the handle until it is destroyed.
                continue


def _package() -> Any:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ConfigError(f"NIXL is not installed, expected one of {', '.join(PACKAGES)}: pip install nixl")


def _rows(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    rows = np.zeros((len(lengths), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows


def _failed(write_id: int, agent: str, error: Exception) -> Completion:
    detail = f"the write to agent {agent} failed ({type(error).__name__}: {error})"
    return Completion(write_id, Fault(Reason.TRANSPORT_FAILED, detail))
