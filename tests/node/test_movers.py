# SPDX-License-Identifier: Apache-2.0
"""The node's mover: watched from its start on, whatever the node does with it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvpush_client._proto import mover_pb2
from kvpush_client.pool import Pool
from kvpushd.core.ledger import Ledger
from kvpushd.errors import MoverDied
from kvpushd.mover.child import Child, MoverSettings
from kvpushd.mover.link import Link
from kvpushd.mover.transport.fake import FakeFabric
from kvpushd.mover.twin import MoverThread
from kvpushd.node.hub import Hub
from kvpushd.node.movers import Movers
from testing.rank import layout

DEADLINE = 60.0
SILENCE = 5.0
CUT = layout(4)

MakeChild = Callable[[socket.socket], Child]


class Answerless:
    """A Child that says that it is ready, and nothing else, or that it lives."""

    pid = 1

    def __init__(self, end: socket.socket, *, beats: bool) -> None:
        self._link = Link(end)
        self._dead = asyncio.Event()
        self._link.send(mover_pb2.MoverReport(ready=mover_pb2.MoverReady(pid=1)).SerializeToString())
        self._beating = asyncio.ensure_future(self._beat()) if beats else None

    async def _beat(self) -> None:
        while True:
            self._link.send(mover_pb2.MoverReport(beat=mover_pb2.MoverBeat()).SerializeToString())
            await asyncio.sleep(0.1)

    def begin(self) -> None:
        pass

    def kill(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        self._link.close()
        self._dead.set()

    async def wait(self) -> str:
        await self._dead.wait()
        return "killed"


@asynccontextmanager
async def watched(
    on_replaced: Callable[[Movers], Awaitable[None]], children: Sequence[MakeChild] = ()
) -> AsyncIterator[Movers]:
    """Movers in good order; the ones to come are `children`, then good ones."""
    good: MakeChild = partial(MoverThread, FakeFabric())
    makers = iter([good, *children])

    def start(settings: MoverSettings, pass_fds: Sequence[int]) -> tuple[Link, Child]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Link(ours), next(makers, good)(theirs)

    movers = Movers(
        Hub(Ledger()),
        lambda number: MoverSettings(str(number)),
        (),
        lambda fault: None,
        lambda: on_replaced(movers),
        silence=SILENCE,
        write_patience=DEADLINE,
        start=start,
    )
    await movers.start()
    watching = asyncio.ensure_future(movers.watch())
    try:
        async with asyncio.timeout(DEADLINE):
            yield movers
        assert not watching.done(), "it is watched until it is stopped"
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await movers.stop()


async def kill(movers: Movers) -> None:
    assert movers.handle is not None
    await movers.handle.kill()


@pytest.mark.parametrize("beats", [False, True], ids=["stands still", "beats"])
def test_a_mover_that_answers_nothing_while_pools_are_mapped_again_is_killed_and_replaced(
    beats: bool,
) -> None:
    async def run() -> None:
        pool, mapped = Pool.create(CUT.pool_bytes, "test"), asyncio.Event()

        async def map_again(movers: Movers) -> None:
            with contextlib.suppress(MoverDied):
                await movers.map_pool(b"pool", pool.fd, CUT)
                mapped.set()

        async with watched(map_again, [partial(Answerless, beats=beats)]) as movers:
            await kill(movers)
            await mapped.wait()
            assert movers.restarts == 2
            assert movers.pools == {b"pool"}
        pool.close()

    asyncio.run(run())


def test_a_mover_is_watched_though_the_pools_of_the_one_before_it_could_not_be_mapped_again() -> None:
    async def run() -> None:
        asked: asyncio.Queue[int] = asyncio.Queue()

        async def fail(movers: Movers) -> None:
            asked.put_nowait(movers.restarts)
            raise OSError("a fault of a test")

        async with watched(fail) as movers:
            for number in (1, 2):
                await kill(movers)
                assert await asked.get() == number

    asyncio.run(run())


def test_a_node_is_not_ready_until_its_pools_are_mapped_again() -> None:
    async def run() -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def wait(movers: Movers) -> None:
            asked.set()
            await go_on.wait()

        async with watched(wait) as movers:
            assert movers.problem is None
            await kill(movers)
            await asked.wait()
            assert movers.problem == "the mover was replaced and is mapping the pools"
            go_on.set()
            await asyncio.sleep(0)
            assert movers.problem is None

    asyncio.run(run())
