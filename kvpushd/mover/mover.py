# SPDX-License-Identifier: Apache-2.0
"""What a mover does with each command: the pools it maps, the ways it has, the writes it carries.

No socket and no loop: `process` and the tests drive it, from one thread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpush_client._proto import mover_pb2, types_pb2
from kvpush_client.events import Fault
from kvpushd.core.layout import Layout, Window
from kvpushd.core.plan import Planner
from kvpushd.core.runs import Runs
from kvpushd.errors import BadMemory, Invalid, KvpushError
from kvpushd.memory.host import Mapping, map_memory
from kvpushd.mover import blocks
from kvpushd.mover.attention import RECEIVING, SENDING, Attention, Rest, longest_wait
from kvpushd.mover.transport.base import LOCAL_OUTLET, Carrier, Completion, Region, Transport, Write
from kvpushd.rpc import wire

# Page tables are filled in by slices of about a millisecond, while nothing of this mover's is in flight.
POPULATE_BYTES = 4 << 20
# Rounds are half a second apart at most: so beats are about a second apart.
BEAT_SECONDS = 0.7

Reports = list[mover_pb2.MoverReport]
_Lane = tuple[bytes, int, bytes]
"""From a pool, through an outlet, into a pool behind it."""


@dataclass(slots=True, eq=False)
class _Pool:
    """A pool mapped here, and what keeps it mapped."""

    mapping: Mapping
    layout: Layout
    inlets: set[int] = field(default_factory=set)
    writes: int = 0
    leaving: bool = False
    populated: int = 0


@dataclass(frozen=True, slots=True)
class _Posted:
    """A write under way: the local pools it holds, and what its report will say."""

    pools: tuple[bytes, ...]
    bytes: int
    runs: int
    posted_ns: int


class Mover:
    """Commands in, reports out. `step` once a round, at least every `wait` seconds."""

    def __init__(
        self,
        local: Carrier,
        transport: Transport,
        outgoing: Carrier | None = None,
        lanes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`local` carries between pools mapped here, `transport` to other movers.

        Where `outgoing` is given, writes to outlets are posted through it: `transport` itself, wrapped.
        `lanes` says what carries them, in the transport's words.
        """
        self._lanes = lanes
        self._local = local
        self._transport = transport
        self._outgoing: Carrier = transport if outgoing is None else outgoing
        self._pools: dict[bytes, _Pool] = {}
        self._outlets: dict[int, dict[bytes, Layout]] = {}
        self._planners: dict[_Lane, Planner] = {}
        self._writes: dict[int, _Posted] = {}
        self._sparse: deque[_Pool] = deque()
        self._attention = Attention.IDLE
        self._rest, self._pause = Rest(*RECEIVING), Rest(*SENDING)
        self._ended_some = False
        self._rounds = 0
        self._landed_bytes = 0
        self._last_beat = 0.0

    @property
    def bell(self) -> int | None:
        """The transport's, see there."""
        return self._transport.bell

    @property
    def rest(self) -> float:
        """Seconds to rest before the next round where the bell rang for the last one."""
        # Not where it only sends: a socket that was full rings once a third of it is free, and not before.
        return 0.0 if self._busy or self._attention is not Attention.FILLING else self._rest.seconds

    @property
    def wait(self) -> float:
        """Seconds until the next round is due where nothing comes; 0 = at once."""
        if self._busy:
            return 0.0
        if self._outgoing.in_flight:
            return 0.0 if self._ended_some else self._pause.seconds
        return longest_wait(self._attention, self.bell is not None)

    @property
    def _busy(self) -> bool:
        """Whether there is work of its own to do."""
        return bool(self._local.in_flight or (self._sparse and not self._writes))

    def ready(self) -> mover_pb2.MoverReport:
        """What is said once, first."""
        names = [self._local.name, self._transport.name]
        return mover_pb2.MoverReport(ready=mover_pb2.MoverReady(pid=os.getpid(), transports=names))

    def handle(self, command: mover_pb2.MoverCommand, descriptor: int | None = None) -> Reports:
        """Does one command and returns the reports that are due at once. `descriptor` came with it (MapPool),
        and is closed here."""
        match command.WhichOneof("command"):
            case "map_pool":
                return [self._map_pool(command.map_pool, descriptor)]
            case "unmap_pool":
                return self._unmap_pool(command.unmap_pool.pool_id)
            case "open_inlet":
                return [self._open_inlet(command.open_inlet)]
            case "close_inlet":
                return self._close_inlet(command.close_inlet.inlet_id)
            case "open_outlet":
                return [self._open_outlet(command.open_outlet)]
            case "close_outlet":
                self._close_outlet(command.close_outlet)
                return []
            case "post_write":
                return self._post(command.post_write)
            case "attend":
                self._attention = Attention(command.attend.attention)
                return []
            case unknown:
                raise Invalid(f"a mover knows no command {unknown}: the daemon is of another version")

    def step(self, rang: bool = True) -> Reports:
        """One round: progress for writes and inlets, and what came of it. `rang`: whether the bell did."""
        self._rounds += 1
        reports: Reports = []
        begun = time.monotonic()
        ended = [completion for carrier in (self._local, self._outgoing) for completion in carrier.poll()]
        for completion in ended:
            reports.extend(self._ended(completion))
        # What was begun in its place may have ended as it began.
        self._ended_some = bool(ended)
        self._transport.progress()
        if self._sparse and not self._writes:
            self._populate(self._sparse[0])
        now = time.monotonic()
        for rest, goes_on in ((self._rest, rang), (self._pause, self._outgoing.in_flight)):
            if goes_on:
                rest.after(now - begun)
            else:
                rest.over()
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            reports.append(mover_pb2.MoverReport(beat=self._beat()))
        return reports

    def _beat(self) -> mover_pb2.MoverBeat:
        held = self._transport.handles()
        return mover_pb2.MoverBeat(
            rounds=self._rounds,
            bytes=self._landed_bytes,
            lanes=self._lanes(),
            outlets=held.outlets,
            transfers=held.transfers,
            registrations=held.registrations,
            counted_unix_ns=time.time_ns(),
        )

    def close(self) -> None:
        """Fences all inlets, then unmaps all pools."""
        self._local.close()
        self._outgoing.close()
        for pool in self._pools.values():
            pool.mapping.close()
        self._pools.clear()

    def _map_pool(self, command: mover_pb2.MapPool, descriptor: int | None) -> mover_pb2.MoverReport:
        answer = mover_pb2.PoolMapped(pool_id=command.pool_id)
        try:
            if descriptor is None:
                raise BadMemory(
                    "the pool's descriptor did not arrive: the daemon or its mover has too many files open"
                )
            try:
                self._add_pool(command.pool_id, wire.layout_from_wire(command.layout), descriptor)
            finally:
                os.close(descriptor)
        except KvpushError as error:
            answer.fault.CopyFrom(wire.fault_to_wire(error.fault()))
        return mover_pb2.MoverReport(pool_mapped=answer)

    def _add_pool(self, pool_id: bytes, layout: Layout, descriptor: int) -> None:
        if pool_id in self._pools:
            raise Invalid(f"pool {pool_id.hex()} is mapped already: unmap it first")
        mapping = map_memory(descriptor, layout.pool_bytes)
        region = Region(pool_id, mapping.address, mapping.nbytes)
        try:
            for carrier in (self._outgoing, self._local):
                carrier.register(region)
        except KvpushError:
            # Who has not registered it has nothing to undo.
            self._outgoing.deregister(pool_id)
            mapping.close()
            raise
        self._pools[pool_id] = _Pool(mapping, layout)
        self._sparse.append(self._pools[pool_id])

    def _populate(self, pool: _Pool) -> None:
        """Fills in a slice of the pool's page tables; drops it from the queue once all are, or can't be."""
        went_well = pool.mapping.populate(pool.populated, POPULATE_BYTES)
        pool.populated += POPULATE_BYTES
        if not went_well or pool.populated >= pool.mapping.nbytes:
            self._sparse.remove(pool)

    def _unmap_pool(self, pool_id: bytes) -> Reports:
        pool = self._pools.get(pool_id)
        if pool is None:
            return [_unmapped(pool_id)]
        pool.leaving = True
        return self._let_go(pool_id)

    def _let_go(self, pool_id: bytes) -> Reports:
        """Unmaps a pool that is to leave, once nothing holds it."""
        pool = self._pools[pool_id]
        # An inlet may land bytes in it, a write reads or fills it: unmapped under either, it is a SIGSEGV.
        if not pool.leaving or pool.inlets or pool.writes:
            return []
        self._local.deregister(pool_id)
        self._outgoing.deregister(pool_id)
        if pool in self._sparse:
            self._sparse.remove(pool)
        pool.mapping.close()
        del self._pools[pool_id]
        for lane in [lane for lane in self._planners if pool_id in lane]:
            del self._planners[lane]
        return [_unmapped(pool_id)]

    def _open_inlet(self, command: mover_pb2.OpenInlet) -> mover_pb2.MoverReport:
        answer = mover_pb2.InletOpened(inlet_id=command.inlet_id)
        try:
            pools = [self._pool(pool_id) for pool_id in command.pool_ids]
            regions = [
                Region(pool_id, pool.mapping.address, pool.mapping.nbytes)
                for pool_id, pool in zip(command.pool_ids, pools, strict=True)
            ]
            metadata = self._transport.open_inlet(command.inlet_id, command.agent, regions)
        except KvpushError as error:
            answer.fault.CopyFrom(wire.fault_to_wire(error.fault()))
            return mover_pb2.MoverReport(inlet_opened=answer)
        for pool in pools:
            pool.inlets.add(command.inlet_id)
        inlet = types_pb2.Inlet(transport=self._transport.name, agent=command.agent, metadata=metadata)
        answer.inlet.CopyFrom(inlet)
        answer.bases.extend(region.address for region in regions)
        return mover_pb2.MoverReport(inlet_opened=answer)

    def _close_inlet(self, inlet_id: int) -> Reports:
        self._transport.close_inlet(inlet_id)
        closed = mover_pb2.InletClosed(inlet_id=inlet_id)
        reports = [mover_pb2.MoverReport(inlet_closed=closed)]
        for pool_id, pool in list(self._pools.items()):
            pool.inlets.discard(inlet_id)
            reports.extend(self._let_go(pool_id))
        return reports

    def _open_outlet(self, command: mover_pb2.OpenOutlet) -> mover_pb2.MoverReport:
        answer = mover_pb2.OutletOpened(outlet_id=command.outlet_id)
        inlet = command.inlet
        try:
            if command.outlet_id == LOCAL_OUTLET:
                raise Invalid(f"outlet {LOCAL_OUTLET} is this mover itself: use another id")
            if inlet.transport != self._transport.name:
                raise Invalid(f"the inlet is of transport {inlet.transport}, expected {self._transport.name}")
            layouts = {pool.pool_id: wire.layout_from_wire(pool.layout) for pool in command.pools}
            regions = [Region(p.pool_id, p.base, layouts[p.pool_id].pool_bytes) for p in command.pools]
            self._transport.open_outlet(command.outlet_id, inlet.agent, inlet.metadata, regions)
            self._outlets[command.outlet_id] = layouts
        except KvpushError as error:
            answer.fault.CopyFrom(wire.fault_to_wire(error.fault()))
        return mover_pb2.MoverReport(outlet_opened=answer)

    def _close_outlet(self, command: mover_pb2.CloseOutlet) -> None:
        self._outlets.pop(command.outlet_id, None)
        for lane in [lane for lane in self._planners if lane[1] == command.outlet_id]:
            del self._planners[lane]
        if command.now:
            self._transport.cut_outlet(command.outlet_id)
        else:
            self._transport.close_outlet(command.outlet_id)

    def _post(self, command: mover_pb2.PostWrite) -> Reports:
        if command.write_id in self._writes:
            # Said twice. It ends once: a second report would free blocks that the first write still reads.
            return []
        posted_ns = time.monotonic_ns()
        try:
            source = self._pool(command.source_pool).layout
            target = self._target(command)
            lane = (command.source_pool, command.outlet_id, command.target_pool)
            if lane not in self._planners:
                self._planners[lane] = Planner(source, target)
            runs = self._planners[lane].plan(
                blocks.from_wire(command.source_blocks),
                blocks.from_wire(command.target_blocks),
                Window(command.start, command.end, command.first_layer, command.end_layer),
            )
            _bound("source", runs.source, runs, source)
            _bound("target", runs.target, runs, target)
            posted = _Posted(self._holds(command), int(runs.length.sum()), len(runs.length), posted_ns)
            if posted.runs == 0:
                return [_write_ended(command.write_id, posted, None)]
            carrier = self._local if command.outlet_id == LOCAL_OUTLET else self._outgoing
            carrier.post(
                Write(command.write_id, command.outlet_id, command.source_pool, command.target_pool, runs)
            )
        except KvpushError as error:
            return [_write_ended(command.write_id, _Posted((), 0, 0, posted_ns), error.fault())]
        self._writes[command.write_id] = posted
        for pool_id in posted.pools:
            self._pools[pool_id].writes += 1
        return []

    def _ended(self, completion: Completion) -> Reports:
        posted = self._writes.pop(completion.write_id, None)
        if posted is None:
            return []  # said twice: one end has freed its blocks, which may be another's by now
        if completion.fault is None:
            self._landed_bytes += posted.bytes
        reports = [_write_ended(completion.write_id, posted, completion.fault)]
        for pool_id in posted.pools:
            self._pools[pool_id].writes -= 1
            reports.extend(self._let_go(pool_id))
        return reports

    def _pool(self, pool_id: bytes) -> _Pool:
        pool = self._pools.get(pool_id)
        if pool is None or pool.leaving:
            raise Invalid(f"pool {pool_id.hex()} is not mapped in this mover: map it first")
        return pool

    def _target(self, command: mover_pb2.PostWrite) -> Layout:
        if command.outlet_id == LOCAL_OUTLET:
            return self._pool(command.target_pool).layout
        layouts = self._outlets.get(command.outlet_id)
        if layouts is None:
            raise Invalid(f"outlet {command.outlet_id} is not open: open it before writing")
        if command.target_pool not in layouts:
            raise Invalid(f"pool {command.target_pool.hex()} is not behind outlet {command.outlet_id}")
        return layouts[command.target_pool]

    def _holds(self, command: mover_pb2.PostWrite) -> tuple[bytes, ...]:
        """The pools of this mover that a write reads or fills."""
        if command.outlet_id == LOCAL_OUTLET and command.target_pool != command.source_pool:
            return command.source_pool, command.target_pool
        return (command.source_pool,)


def _bound(side: str, offsets: NDArray[np.int64], runs: Runs, layout: Layout) -> None:
    """Raises Invalid where a run leaves its pool. The plan keeps them inside; this is the last gate."""
    if len(runs.length) == 0:
        return
    first, last = int(offsets.min()), int((offsets + runs.length).max())
    if first < 0 or last > layout.pool_bytes or int(runs.length.min()) <= 0:
        raise Invalid(
            f"the plan's {side} runs span bytes {first:,} to {last:,}, outside the pool of "
            f"{layout.pool_bytes:,} bytes"
        )


def _unmapped(pool_id: bytes) -> mover_pb2.MoverReport:
    return mover_pb2.MoverReport(pool_unmapped=mover_pb2.PoolUnmapped(pool_id=pool_id))


def _write_ended(write_id: int, posted: _Posted, fault: Fault | None) -> mover_pb2.MoverReport:
    ended = mover_pb2.WriteEnded(
        write_id=write_id,
        bytes=posted.bytes if fault is None else 0,
        runs=posted.runs,
        posted_monotonic_ns=posted.posted_ns,
        ended_monotonic_ns=time.monotonic_ns(),
    )
    if fault is not None:
        ended.fault.CopyFrom(wire.fault_to_wire(fault))
    return mover_pb2.MoverReport(write_ended=ended)
