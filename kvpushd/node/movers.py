# SPDX-License-Identifier: Apache-2.0
"""The mover of the node: kept alive, watched, replaced by a spare that waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from kvpush_client._proto import types_pb2
from kvpush_client.events import Fault, Reason
from kvpush_client.layout import Layout
from kvpushd.core.attention import Attention
from kvpushd.core.events import WriteEnded
from kvpushd.core.instructions import Post
from kvpushd.errors import KvpushError, MoverDied
from kvpushd.mover import attention as levels
from kvpushd.mover.child import MoverSettings, StartMover
from kvpushd.mover.handle import MoverHandle, OutletPool
from kvpushd.node.hub import Hub
from kvpushd.node.tasks import Tasks

LOOK = 1.0
"""Seconds between looks at its last beat, and from its start to that of the next spare, so that a mover that
begins has the machine to itself."""
SPARE_PATIENCE = 60.0
"""Seconds from the start of a spare that ended unasked, or of one that could not be started, to the next."""
CALM = 0.1
"""Seconds until a mover hears that it may look less eagerly: with each end that costs it a round."""
FIRST_PATIENCE, LONGEST_PATIENCE = 0.05, 5.0
"""Seconds before a mover is started again that can't be, or that died soon after it was."""

LEVELS = {
    Attention.IDLE: levels.Attention.IDLE,
    Attention.EXPECTING: levels.Attention.EXPECTING,
    Attention.FILLING: levels.Attention.FILLING,
}


class Movers:
    """One mover for all pools of the node: a CPU node needs no more. What is asked of it while it is being
    replaced fails as if it had died of it.

    A spare that has loaded everything stands by: that is nearly all of a mover's start. Where it is missing,
    or does not begin, a new process takes its place.
    """

    def __init__(
        self,
        hub: Hub,
        settings: Callable[[int], MoverSettings],
        pass_fds: Sequence[int],
        on_died: Callable[[Fault], None],
        on_replaced: Callable[[], Awaitable[None]],
        *,
        silence: float,
        write_patience: float,
        start: StartMover,
    ) -> None:
        """`settings` are asked for at each start of a process, by its number: an agent's name is used once.
        `on_died` is called as soon as a mover is reaped, `on_replaced` once the next one is ready, and
        cancelled where that dies before it is through. One that does not beat for `silence` seconds counts as
        stuck; it beats each second or sooner. So does one that has not answered a call by then. Where nothing
        was said of a write for `write_patience` seconds, its way is cut, since nothing else ends it; a mover
        that says nothing then either counts as stuck. A spare that is to begin has `silence` seconds for it.
        `start` makes the processes."""
        self._hub = hub
        self._settings = settings
        self._pass_fds = pass_fds
        self._on_died = on_died
        self._on_replaced = on_replaced
        self._silence = silence
        self._write_patience = write_patience
        self._start_process = start
        self._handle: MoverHandle | None = None
        self._spare: MoverHandle | None = None
        self._spare_due = 0.0
        self._starts = 0
        self._attention = Attention.IDLE
        self._attending = levels.Attention.IDLE
        self._calming: asyncio.TimerHandle | None = None
        self._ids = 0
        self._whole = False
        self._tasks = Tasks("movers")
        self.restarts = 0
        self.pools: set[bytes] = set()
        self.inlets: set[int] = set()
        self._log = structlog.get_logger("kvpushd.movers")

    async def start(self) -> None:
        """Starts the first mover. Raises MoverDied where it can't be."""
        await self._start()
        self._whole = True

    async def _start(self) -> None:
        """Makes a mover of the spare, else of a new process. Raises MoverDied where neither becomes one."""
        spare, self._spare = self._spare, None
        self._spare_due = 0.0
        handle = None if spare is None else await self._begun(spare)
        if handle is None:
            handle = self._prepare()
            await handle.begin()
        self._handle = handle
        self._log.info("mover ready", pid=handle.pid, transports=handle.transports, was_spare=handle is spare)

    async def _begun(self, spare: MoverHandle) -> MoverHandle | None:
        """The spare as a mover; None where it does not become one, so that a new process must."""
        try:
            await spare.begin(self._silence)
        except MoverDied as error:
            self._log.warning("the spare mover does not begin", error=str(error))
            return None
        return spare

    def _prepare(self) -> MoverHandle:
        """A new process. Raises MoverDied where there can't be one."""
        settings = self._settings(self._starts)
        self._starts += 1
        try:
            return MoverHandle.prepare(settings, pass_fds=self._pass_fds, start=self._start_process)
        except OSError as error:
            raise MoverDied(f"the mover can't be started: {error}") from error

    def _keep_spare(self, now: float) -> None:
        """Sees to it that there is a spare; where one ended unasked, not at once: the next one may too."""
        if self._spare is not None and self._spare.died.done():
            self._log.warning("the spare mover died", fault=str(self._spare.died.result()))
            self._spare = None
        if self._spare is None and now >= self._spare_due:
            self._spare_due = now + SPARE_PATIENCE
            try:
                self._spare = self._prepare()
            except MoverDied as error:
                self._log.warning("there is no spare mover", error=str(error))

    @property
    def handle(self) -> MoverHandle | None:
        """The mover, where one lives."""
        return self._handle

    @property
    def problem(self) -> str | None:
        """Why nothing can be moved now; None where it can."""
        if self._handle is None:
            return "the mover died and is being replaced"
        if not self._whole:
            return "the mover was replaced and is mapping the pools"
        silent = asyncio.get_running_loop().time() - self._handle.last_beat
        return f"the mover has been silent for {silent:.0f} s" if silent > self._silence / 2 else None

    async def watch(self) -> None:
        """Replaces a mover that died, kills one that is stuck. Until cancelled."""
        loop = asyncio.get_running_loop()
        patience = FIRST_PATIENCE
        while True:
            handle = self._handle
            assert handle is not None
            since = loop.time()
            fault = await self._end_of(handle)
            self._handle, self._whole = None, False
            self.restarts += 1
            self.pools.clear()
            self.inlets.clear()
            self._log.error("mover died", pid=handle.pid, fault=str(fault))
            self._on_died(fault)
            await self._tasks.close()
            if loop.time() - since > 2 * LONGEST_PATIENCE:
                patience = FIRST_PATIENCE
            patience = await self._replace(patience)
            self._attending = levels.Attention.IDLE  # so it begins
            self._attend()
            # Beside the next round, which sees it where it dies of what it is given, or does not answer.
            self._tasks.start(self._make_whole())

    async def _make_whole(self) -> None:
        await self._on_replaced()
        self._whole = True

    async def _replace(self, patience: float) -> float:
        """Starts another, at once for the first time, else after `patience` seconds; returns what to wait the
        next time: movers that die of the same cause one after the other must not take the machine."""
        while True:
            if patience > FIRST_PATIENCE:
                await asyncio.sleep(patience)
            patience = min(patience * 2, LONGEST_PATIENCE)
            try:
                await self._start()
            except MoverDied as error:
                self._log.error("mover can't be started", error=str(error))
            else:
                return patience

    async def _end_of(self, handle: MoverHandle) -> Fault:
        loop = asyncio.get_running_loop()
        cut: set[int] = set()
        while True:
            due = loop.time() + LOOK
            done, _ = await asyncio.wait({handle.died}, timeout=LOOK)
            if done:
                return handle.died.result()
            self._keep_spare(loop.time())
            if loop.time() - due > LOOK:
                # This process stood still (a stopped VM, a debugger): beats may wait in the link, unread.
                continue
            for outlet_id in set(handle.silent_outlets(self._write_patience)) - cut:
                self._log.error("nothing is heard of a write: its way is cut", outlet=outlet_id)
                handle.close_outlet(outlet_id, now=True)
                cut.add(outlet_id)
            if (why := self._stuck(handle, loop.time())) is not None:
                self._log.error("mover is stuck: killed", pid=handle.pid, why=why)
                await handle.kill()

    def _stuck(self, handle: MoverHandle, now: float) -> str | None:
        if now - handle.last_beat > self._silence:
            return f"silent for {self._silence:g} s"
        missing = handle.overdue(self._silence, self._write_patience + self._silence)
        return None if missing is None else f"it beats, and says no {missing}"

    async def stop(self) -> None:
        """Ends the mover in order, and the spare."""
        await self._tasks.close()
        if self._calming is not None:
            self._calming.cancel()
        if self._spare is not None:
            await self._spare.kill()
            self._spare = None
        if self._handle is not None:
            await self._handle.stop()
            self._handle = None

    def attend(self, attention: Attention) -> None:
        """Says how eagerly to look for bytes that come in: more so at once, less so when it has lasted."""
        if attention is self._attention:
            return
        self._attention = attention
        if LEVELS[attention] > self._attending:
            self._attend()
        elif self._calming is None:
            self._calming = asyncio.get_running_loop().call_later(CALM, self._calm)

    def _calm(self) -> None:
        self._calming = None
        self._attend()

    def _attend(self) -> None:
        level = LEVELS[self._attention]
        if self._handle is not None and level is not self._attending:
            self._attending = level
            self._handle.attend(level)

    def next_id(self) -> int:
        """A number for an inlet or an outlet, never used before."""
        self._ids += 1
        return self._ids

    def _alive(self) -> MoverHandle:
        if self._handle is None:
            raise MoverDied("the mover died and is being replaced")
        return self._handle

    async def map_pool(self, pool_id: bytes, fd: int, layout: Layout) -> None:
        """Maps and registers a pool. Raises KvpushError."""
        self.pools.add(pool_id)
        try:
            await self._alive().map_pool(pool_id, fd, layout)
        except KvpushError:
            self.pools.discard(pool_id)
            raise

    async def unmap_pool(self, pool_id: bytes) -> None:
        """Returns once the pool is unmapped: also if that is since the mover is dead."""
        try:
            await self._alive().unmap_pool(pool_id)
        except MoverDied:
            self._log.info("pool was unmapped by the mover's death", pool=pool_id.hex())
        self.pools.discard(pool_id)

    async def open_inlet(
        self, inlet_id: int, pool_ids: Sequence[bytes], agent: str
    ) -> tuple[types_pb2.Inlet, list[int]]:
        """Makes a receiving agent. Raises KvpushError."""
        opened = await self._alive().open_inlet(inlet_id, pool_ids, agent)
        self.inlets.add(inlet_id)
        return opened

    async def close_inlet(self, inlet_id: int) -> None:
        """The fence: returns once nothing lands through it. Raises MoverDied, which is a fence too."""
        self.inlets.discard(inlet_id)
        await self._alive().close_inlet(inlet_id)

    async def open_outlet(self, outlet_id: int, inlet: types_pb2.Inlet, pools: Sequence[OutletPool]) -> None:
        """Makes a peer's inlet a place to write to. Raises KvpushError."""
        await self._alive().open_outlet(outlet_id, inlet, pools)

    def close_outlet(self, outlet_id: int) -> None:
        """Forgets it, once its last write has ended."""
        if self._handle is not None:
            self._handle.close_outlet(outlet_id)

    def post(self, post: Post, *, source_pool: bytes, outlet_id: int, target_pool: bytes) -> None:
        """Begins a write; its end is fed to the hub."""
        try:
            self._alive().post(
                post.write,
                source_pool=source_pool,
                source_blocks=post.source_blocks,
                outlet_id=outlet_id,
                target_pool=target_pool,
                target_blocks=post.target_blocks,
                window=post.window,
                ended=self._hub.feed,
            )
        except KvpushError as error:
            self.refuse(post, error.fault())

    def refuse(self, post: Post, fault: Fault | None = None) -> None:
        """Ends a write that could not be begun."""
        fault = fault or Fault(Reason.ENGINE_GONE, "the pool is not mapped any more")
        self._hub.feed(WriteEnded(post.write, fault))
