# SPDX-License-Identifier: Apache-2.0
"""kvpushd's own movers, as its daemon drives them: two processes, writes cut and paced by its core."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Coroutine, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.wire import case as cases
from benchmarks.wire.case import POOL_BYTES, RUNS, TRANSPORTS, Case
from benchmarks.wire.contender import WrongBytes
from benchmarks.wire.memory import Memory
from kvpush_client.layout import Group, Layer, Layout, Plane
from kvpushd.core.events import WriteEnded
from kvpushd.core.layout import Blocks, Window
from kvpushd.core.pace import Pace
from kvpushd.core.words import WriteId
from kvpushd.mover.attention import Attention
from kvpushd.mover.child import MoverSettings
from kvpushd.mover.handle import MoverHandle, OutletPool
from kvpushd.settings import Settings

R = TypeVar("R")
TOKENS = 4
"""Of a block."""
DEADLINE = 60.0


def layout(run: int) -> Layout:
    """One layer of blocks of `run` bytes."""
    plane = Plane(0, run, run, run // TOKENS, run // TOKENS)
    layer = Layer("layer", 0, 0, 1, 1, (plane,))
    return Layout(POOL_BYTES, POOL_BYTES // run, (Group(TOKENS),), (layer,))


class Movers:
    """A mover that sends to a mover that receives. This process stands in for both daemons."""

    name = "kvpushd"

    def __init__(self, memory: Memory, transport: str) -> None:
        self._runner = asyncio.Runner()
        self._numbers = itertools.count(1)
        # As a daemon has it that is not told otherwise.
        flight, write = (
            Settings.model_fields[name].default for name in ("peer_bytes_in_flight", "window_bytes")
        )
        self._pace = Pace(flight, write)
        self._source, self._target = memory.source, memory.target
        self._sender, self._receiver = self._run(self._meet(TRANSPORTS[transport]))

    @property
    def pids(self) -> Sequence[int]:
        """The movers, and this process."""
        return [self._sender.pid, self._receiver.pid, os.getpid()]

    def turn(self, case: Case) -> float:
        """Writes a pool's worth of blocks."""
        return self._run(asyncio.wait_for(self._write(case), DEADLINE))

    def check(self, case: Case) -> None:
        """Raises WrongBytes."""
        found = np.frombuffer(self._target.view, np.uint8)
        if not cases.arrived(found, case.shape, case.run):
            raise WrongBytes(f"kvpushd, {case.name}: the target does not hold what was sent")
        found[:] = 1

    def close(self) -> None:
        """Ends the movers."""
        for mover in (self._sender, self._receiver):
            self._run(mover.stop())
        self._runner.close()

    def _run(self, scene: Coroutine[object, object, R]) -> R:
        return self._runner.run(scene)

    async def _meet(self, ucx_tls: str) -> tuple[MoverHandle, MoverHandle]:
        names = [f"wire-{os.getpid()}-{ucx_tls}-{role}" for role in ("sender", "receiver")]
        sender, receiver = await asyncio.gather(
            *(MoverHandle.spawn(MoverSettings(name, ucx_tls=ucx_tls)) for name in names)
        )
        for run in RUNS:
            await sender.map_pool(_pool(run), self._source.fd, layout(run))
            await receiver.map_pool(_pool(run), self._target.fd, layout(run))
        inlet, bases = await receiver.open_inlet(1, [_pool(run) for run in RUNS], f"{names[1]}-inlet")
        pools = [OutletPool(_pool(run), base, layout(run)) for run, base in zip(RUNS, bases, strict=True)]
        await sender.open_outlet(1, inlet, pools)
        return sender, receiver

    async def _write(self, case: Case) -> float:
        sources, targets = cases.places(case.shape, case.run)
        self._receiver.attend(Attention.FILLING)
        loop = asyncio.get_running_loop()
        begun = time.monotonic()
        flying: dict[asyncio.Future[WriteEnded], int] = {}
        first, count = 0, len(sources)
        while first < count or flying:
            while first < count:
                last = min(first + max(self._pace.write // case.run, 1), count)
                if not self._pace.room((last - first) * case.run):
                    break
                ended: asyncio.Future[WriteEnded] = loop.create_future()
                self._sender.post(
                    WriteId(next(self._numbers)),
                    source_pool=_pool(case.run),
                    source_blocks=(Blocks(0, 0, sources[first:last]),),
                    outlet_id=1,
                    target_pool=_pool(case.run),
                    target_blocks=(Blocks(0, 0, targets[first:last]),),
                    window=Window(0, (last - first) * TOKENS, 0, 1),
                    ended=ended.set_result,
                )
                flying[ended] = (last - first) * case.run
                self._pace.posted(flying[ended], time.monotonic_ns())
                first = last
            done, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                end = each.result()
                if end.fault is not None:
                    raise RuntimeError(f"kvpushd, {case.name}: {end.fault}")
                self._pace.ended(flying.pop(each), end.posted, end.ended)
        seconds = time.monotonic() - begun
        self._receiver.attend(Attention.IDLE)
        return seconds


def _pool(run: int) -> bytes:
    return b"pool-%d" % run
