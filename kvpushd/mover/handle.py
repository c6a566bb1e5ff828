# SPDX-License-Identifier: Apache-2.0
"""A mover as the daemon uses it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import structlog
from google.protobuf.message import DecodeError

from kvpush_client._proto import mover_pb2, types_pb2
from kvpush_client.events import Fault, Reason
from kvpushd.core.events import WriteEnded
from kvpushd.core.layout import BlockLists, Layout, Window
from kvpushd.core.words import WriteId
from kvpushd.errors import BadMemory, Invalid, KvpushError, LayoutMismatch, MoverDied, TransportFailed
from kvpushd.mover import blocks
from kvpushd.mover.attention import Attention
from kvpushd.mover.child import Child, MoverProcess, MoverSettings, StartMover
from kvpushd.mover.link import Link, LinkBroken, LinkClosed
from kvpushd.rpc import wire

Ended = Callable[[WriteEnded], None]
_Key = tuple[str, bytes | int]

# How long a mover whose link has closed may take to exit by itself.
GRACE_SECONDS = 1.0

# What a mover refuses with; KvpushError for what a later one may.
_REFUSALS: dict[Reason, type[KvpushError]] = {
    kind.reason: kind for kind in (BadMemory, Invalid, LayoutMismatch, TransportFailed)
}


@dataclass(frozen=True, slots=True)
class OutletPool:
    """A pool behind an outlet: its address in the other mover, and how it is cut."""

    pool_id: bytes
    base: int
    layout: Layout


class MoverHandle:
    """Commands to one mover, and its reports. One event loop's; nothing here blocks or computes.

    A call raises the KvpushError that the mover refused it with. When the mover dies, every call that waits
    raises MoverDied, every write in flight ends with that fault, exactly once, and then `died` is done; what
    is asked of the handle later fails in the same way. Cancelling a call leaves the mover to finish it.
    """

    def __init__(self, link: Link, child: Child) -> None:
        """For `spawn`, and for a mover that is no process. Must be called on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._child = child
        self._open = True
        self._grace: asyncio.TimerHandle | None = None
        self._calls: dict[_Key, asyncio.Future[mover_pb2.MoverReport]] = {}
        self._asked: dict[_Key, float] = {}
        self._writes: dict[int, tuple[Ended, float, int]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.exception())  # not everybody awaits it
        self._died: asyncio.Future[Fault] = self._loop.create_future()
        self._transports: tuple[str, ...] = ()
        self._last_beat = self._loop.time()
        self.beat = mover_pb2.MoverBeat()
        """The last: what the mover said of itself; empty before the first."""
        self._log = structlog.get_logger("kvpushd.mover")
        self._loop.add_reader(link.fileno(), self._readable)
        self._watch = self._loop.create_task(self._bury())

    @classmethod
    async def spawn(
        cls,
        settings: MoverSettings,
        *,
        pass_fds: Sequence[int] = (),
        within: float = 30.0,
        start: StartMover = MoverProcess.start,
    ) -> MoverHandle:
        """Starts a mover process and returns once it is ready. As `prepare` and `begin`."""
        handle = cls.prepare(settings, pass_fds=pass_fds, start=start)
        await handle.begin(within)
        return handle

    @classmethod
    def prepare(
        cls,
        settings: MoverSettings,
        *,
        pass_fds: Sequence[int] = (),
        start: StartMover = MoverProcess.start,
    ) -> MoverHandle:
        """Starts a spare: a process that loads what a mover needs, and then waits for `begin`. It has no
        agent, no pool and no thread but one. `pass_fds` are inherited and stay open until it dies.
        """
        return cls(*start(settings, pass_fds))

    async def begin(self, within: float = 30.0) -> None:
        """Makes a mover of a spare, and returns once it is ready.

        Raises MoverDied where it ends before that, or takes longer than `within` seconds; it is then killed.
        """
        self._child.begin()
        try:
            await asyncio.wait_for(self.ready(), within)
        except TimeoutError:
            await self.kill()
            raise MoverDied(
                f"the mover was not ready within {within:g} s: is the machine overloaded?"
            ) from None
        except asyncio.CancelledError:
            self._child.kill()
            raise

    async def ready(self) -> None:
        """Returns once the mover runs. Raises MoverDied where it ended before that."""
        await asyncio.shield(self._ready)

    @property
    def pid(self) -> int:
        """The mover's process id."""
        return self._child.pid

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that loaded."""
        return self._transports

    @property
    def last_beat(self) -> float:
        """When the mover was last heard of, by the loop's clock. It beats about each second."""
        return self._last_beat

    @property
    def lanes(self) -> tuple[str, ...]:
        """What carries bytes between movers, as of the last beat, e.g. "tcp/eth0"; empty before the first."""
        return tuple(self.beat.lanes)

    def overdue(self, patience: float, write_patience: float) -> str | None:
        """What the mover should have answered by now: a call within `patience` seconds, what waits for
        writes within `write_patience`. None where there is no such thing."""
        now = self._loop.time()
        for (kind, _), since in self._asked.items():
            if now - since > (write_patience if kind == "pool_unmapped" else patience):
                return kind
        return "write_ended" if self.silent_outlets(write_patience) else None

    def silent_outlets(self, patience: float) -> list[int]:
        """Where writes go of which the mover has not said within `patience` seconds what became of them."""
        since = self._loop.time() - patience
        found = takewhile(lambda write: write[1] < since, self._writes.values())
        return list(dict.fromkeys(outlet_id for _, _, outlet_id in found))

    @property
    def died(self) -> asyncio.Future[Fault]:
        """Done once the mover is reaped: nothing of it reads or writes a pool any more. Also after `stop`."""
        return self._died

    async def map_pool(self, pool_id: bytes, fd: int, layout: Layout) -> None:
        """Maps and registers a pool. The descriptor stays the caller's."""
        command = mover_pb2.MapPool(pool_id=pool_id, layout=wire.layout_to_wire(layout))
        await self._ask(("pool_mapped", pool_id), mover_pb2.MoverCommand(map_pool=command), fd)

    async def unmap_pool(self, pool_id: bytes) -> None:
        """Deregisters and unmaps a pool; returns once no inlet and no write held it any more."""
        command = mover_pb2.UnmapPool(pool_id=pool_id)
        await self._ask(("pool_unmapped", pool_id), mover_pb2.MoverCommand(unmap_pool=command))

    async def open_inlet(
        self, inlet_id: int, pool_ids: Sequence[bytes], agent: str
    ) -> tuple[types_pb2.Inlet, list[int]]:
        """Makes a receiving agent; returns what the peer needs, and the pools' addresses in their order."""
        command = mover_pb2.OpenInlet(inlet_id=inlet_id, pool_ids=pool_ids, agent=agent)
        report = await self._ask(("inlet_opened", inlet_id), mover_pb2.MoverCommand(open_inlet=command))
        return report.inlet_opened.inlet, list(report.inlet_opened.bases)

    async def close_inlet(self, inlet_id: int) -> None:
        """The fence: when it returns, nothing lands through this inlet any more."""
        command = mover_pb2.CloseInlet(inlet_id=inlet_id)
        await self._ask(("inlet_closed", inlet_id), mover_pb2.MoverCommand(close_inlet=command))

    async def open_outlet(self, outlet_id: int, inlet: types_pb2.Inlet, pools: Sequence[OutletPool]) -> None:
        """Makes a peer's inlet a place to write to. 0 is no outlet's id: it means this mover."""
        command = mover_pb2.OpenOutlet(outlet_id=outlet_id, inlet=inlet)
        for pool in pools:
            layout = wire.layout_to_wire(pool.layout)
            command.pools.append(mover_pb2.OutletPool(pool_id=pool.pool_id, base=pool.base, layout=layout))
        await self._ask(("outlet_opened", outlet_id), mover_pb2.MoverCommand(open_outlet=command))

    def close_outlet(self, outlet_id: int, *, now: bool = False) -> None:
        """Forgets it, once its last write has ended, or `now`: then they end with a fault. What is posted to
        it later is refused."""
        self._send(mover_pb2.MoverCommand(close_outlet=mover_pb2.CloseOutlet(outlet_id=outlet_id, now=now)))

    def post(
        self,
        write: WriteId,
        *,
        source_pool: bytes,
        source_blocks: BlockLists,
        outlet_id: int,
        target_pool: bytes,
        target_blocks: BlockLists,
        window: Window,
        ended: Ended,
    ) -> None:
        """Begins a write; `ended` is called exactly once, later, from the loop.

        An end with a fault says that nothing reads the source any more. It does not say that nothing lands:
        for an outlet, that takes the receiver's `close_inlet`.
        """
        if write in self._writes:
            raise ValueError(f"write {write} is in flight: ids are used once")
        self._writes[write] = (ended, self._loop.time(), outlet_id)
        command = mover_pb2.PostWrite(
            write_id=write,
            source_pool=source_pool,
            outlet_id=outlet_id,
            target_pool=target_pool,
            source_blocks=blocks.to_wire(source_blocks),
            target_blocks=blocks.to_wire(target_blocks),
            start=window.start,
            end=window.end,
            first_layer=window.first_layer,
            end_layer=window.end_layer,
        )
        if self._died.done():
            self._end_writes(self._died.result())
            return
        self._send(mover_pb2.MoverCommand(post_write=command))

    def attend(self, level: Attention) -> None:
        """Says how eagerly to poll from now on."""
        attention = mover_pb2.Attention.ValueType(level)
        self._send(mover_pb2.MoverCommand(attend=mover_pb2.Attend(attention=attention)))

    async def stop(self, within: float = 10.0) -> None:
        """Ends the mover in order, or after `within` seconds by SIGKILL. Returns once it is reaped."""
        self._send(mover_pb2.MoverCommand(stop=mover_pb2.StopMover()))
        try:
            await asyncio.wait_for(asyncio.shield(self._died), within)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Ends the mover by SIGKILL, be it stopped or spinning. Returns once it is reaped."""
        self._child.kill()
        await asyncio.shield(self._died)

    async def _ask(
        self, key: _Key, command: mover_pb2.MoverCommand, fd: int | None = None
    ) -> mover_pb2.MoverReport:
        if self._died.done():
            raise MoverDied(self._died.result().detail)
        if key in self._calls:
            raise ValueError(f"{key[0]} is awaited for {key[1]!r} already")
        answer: asyncio.Future[mover_pb2.MoverReport] = self._loop.create_future()
        self._calls[key] = answer
        self._asked[key] = self._loop.time()
        try:
            self._send(command, fd)
            report = await answer
        finally:
            if self._calls.get(key) is answer:
                del self._calls[key]
            self._asked.pop(key, None)
        body = getattr(report, key[0])
        if body.DESCRIPTOR.fields_by_name.get("fault") is not None and body.HasField("fault"):
            fault = wire.fault_from_wire(body.fault)
            raise _REFUSALS.get(fault.reason, KvpushError)(fault.detail)
        return report

    def _send(self, command: mover_pb2.MoverCommand, fd: int | None = None) -> None:
        """Sends, or, where the mover is about to be found dead, does nothing: `_bury` then ends all."""
        if not self._open:
            return
        try:
            self._link.send(command.SerializeToString(), fd)
        except LinkClosed:
            self._hang_up()
            return
        if self._link.pending:
            self._loop.add_writer(self._link.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            self._link.flush()
        except LinkClosed:
            self._hang_up()
            return
        if not self._link.pending:
            self._loop.remove_writer(self._link.fileno())

    def _readable(self) -> None:
        try:
            messages = self._link.receive()
            self._last_beat = self._loop.time()
            for message, descriptor in messages:
                if descriptor is not None:  # movers pass none, unless their memory is damaged
                    os.close(descriptor)
                self._hear(mover_pb2.MoverReport.FromString(message))
        except (LinkBroken, DecodeError) as error:
            # Its memory is damaged, say: what it would report next can be believed no more than this.
            self._log.error("the mover says what is no report: killed", pid=self.pid, error=str(error))
            self._hang_up()
            self._child.kill()
        except LinkClosed:
            self._hang_up()

    def _hear(self, report: mover_pb2.MoverReport) -> None:
        kind = report.WhichOneof("report")
        match kind:
            case "ready":
                self._transports = tuple(report.ready.transports)
                if not self._ready.done():
                    self._ready.set_result(None)
            case "beat":
                self.beat = report.beat
            case "write_ended":
                self._end_write(report.write_ended)
            case "pool_mapped" | "pool_unmapped":
                self._answer((kind, getattr(report, kind).pool_id), report)
            case "inlet_opened" | "inlet_closed":
                self._answer((kind, getattr(report, kind).inlet_id), report)
            case "outlet_opened":
                self._answer((kind, report.outlet_opened.outlet_id), report)

    def _answer(self, key: _Key, report: mover_pb2.MoverReport) -> None:
        # Nobody waits where the call was cancelled.
        answer = self._calls.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(report)

    def _end_write(self, report: mover_pb2.WriteEnded) -> None:
        fault = wire.fault_from_wire(report.fault) if report.HasField("fault") else None
        ended = WriteEnded(
            write=WriteId(report.write_id),
            fault=fault,
            bytes=report.bytes,
            runs=report.runs,
            posted=report.posted_monotonic_ns,
            ended=report.ended_monotonic_ns,
        )
        told = self._writes.pop(report.write_id, None)
        if told is None:
            raise LinkBroken(f"write {report.write_id} ended, which is not under way")
        # By call_soon, so that a callback that raises does not keep the other reports from being heard.
        self._loop.call_soon(told[0], ended)

    def _end_writes(self, fault: Fault) -> None:
        for write in list(self._writes):
            self._loop.call_soon(self._writes.pop(write)[0], WriteEnded(WriteId(write), fault))

    def _hang_up(self) -> None:
        """The link is closed. The mover may yet run: make sure that it does not."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._link.fileno())
        self._loop.remove_writer(self._link.fileno())
        self._link.close()
        # Most likely it is at its exit, and how it ends is worth knowing.
        self._grace = self._loop.call_later(GRACE_SECONDS, self._child.kill)

    async def _bury(self) -> None:
        """Waits for the end of the mover, hears its last words, and tells everybody."""
        how = await self._child.wait()
        for _ in range(2):  # what is left to read, then its end
            if self._open:
                self._readable()
        self._hang_up()
        if self._grace is not None:
            self._grace.cancel()
        fault = Fault(Reason.MOVER_DIED, f"the mover {self._child.pid} ended ({how})")
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(MoverDied(fault.detail))
        self._calls.clear()
        if not self._ready.done():
            self._ready.set_exception(
                MoverDied(f"{fault.detail} before it was ready: see its messages on stderr")
            )
        self._end_writes(fault)
        self._died.set_result(fault)
