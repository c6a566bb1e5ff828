# SPDX-License-Identifier: Apache-2.0
"""The engines of a node: who belongs to one, and what becomes of its pools and its metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvpush_client.event_wire import PoolReady
from kvpush_client.events import Fault, Reason
from kvpush_client.items import DescribePool, Identity, Role
from kvpush_client.layout import Layout
from kvpush_client.pool import Pool
from kvpushd.core.ledger import Ledger
from kvpushd.errors import Duplicate, Invalid, KvpushError
from kvpushd.metrics import Metrics
from kvpushd.node.engines import EngineRoom
from kvpushd.node.hub import Hub
from kvpushd.node.movers import Movers
from kvpushd.rpc.engine import EngineSession
from testing.rank import FINGERPRINT, layout

CUT = layout(4)
SCHEDULER = Identity(
    "engine", "one-launch", Role.SCHEDULER, world_size=4, local_ranks=2, fingerprint=FINGERPRINT
)
WORKER = replace(SCHEDULER, role=Role.WORKER)


class Mapper:
    """In place of movers: maps nothing, fails as it is told to."""

    error: Exception | None = None

    async def map_pool(self, pool_id: bytes, fd: int, layout: Layout) -> None:
        if self.error is not None:
            raise self.error

    async def unmap_pool(self, pool_id: bytes) -> None:
        pass


@asynccontextmanager
async def room(mapper: Mapper, metrics: Metrics) -> AsyncIterator[EngineRoom]:
    made = EngineRoom(
        Hub(Ledger()),
        cast(Movers, mapper),
        lease=30.0,
        peer_address=lambda: ("127.0.0.1", 1),
        software="test",
        first_token=lambda *told: None,
        metrics=metrics,
    )
    async with asyncio.timeout(10):
        yield made
    await made.close()


@pytest.fixture
def metrics() -> Metrics:
    """Of which the series of an engine that is gone are gone at once."""
    return Metrics(CollectorRegistry(), "node", "1", gone_engines=0)


async def joined(engines: EngineRoom, identity: Identity) -> EngineSession:
    session = EngineSession(identity, most_events=100)
    await engines.join(identity, session)
    return session


async def refused(engines: EngineRoom, identity: Identity, error: type[KvpushError]) -> str:
    with pytest.raises(error) as raised:
        await joined(engines, identity)
    return str(raised.value)


def test_who_is_refused_an_engines_name_does_not_hear_its_launch(metrics: Metrics) -> None:
    async def run() -> None:
        async with room(Mapper(), metrics) as engines:
            await joined(engines, replace(SCHEDULER, software="vllm 1"))
            said = await refused(engines, replace(SCHEDULER, launch="another"), Duplicate)
            assert "one-launch" not in said
            assert "'engine'" in said
            assert "another engine (vllm 1): give each" in said

    asyncio.run(run())


def test_an_engine_that_does_not_say_what_it_is_is_called_so(metrics: Metrics) -> None:
    async def run() -> None:
        async with room(Mapper(), metrics) as engines:
            await joined(engines, replace(SCHEDULER, software=""))
            said = await refused(engines, replace(SCHEDULER, launch="another"), Duplicate)
            assert "another engine (unnamed): give each" in said

    asyncio.run(run())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_has_one_scheduler_whatever_rank_another_one_has(metrics: Metrics, rank: int) -> None:
    async def run() -> None:
        async with room(Mapper(), metrics) as engines:
            await joined(engines, SCHEDULER)
            await joined(engines, WORKER)
            assert "scheduler" in await refused(engines, replace(SCHEDULER, rank=rank), Duplicate)

    asyncio.run(run())


def test_an_engine_has_as_many_workers_on_a_node_as_it_says(metrics: Metrics) -> None:
    async def run() -> None:
        async with room(Mapper(), metrics) as engines:
            for rank in (2, 3):
                await joined(engines, replace(WORKER, rank=rank))
            await joined(engines, SCHEDULER)
            assert "rank 0 is one too many" in await refused(engines, WORKER, Invalid)
            await refused(engines, replace(WORKER, rank=3), Duplicate)

    asyncio.run(run())


def test_an_engine_whose_name_another_launch_had_before_keeps_its_series(metrics: Metrics) -> None:
    def shown() -> bool:
        return b'engine="engine"' in generate_latest(metrics.registry)

    async def run() -> None:
        async with room(Mapper(), metrics) as engines:
            former = await joined(engines, SCHEDULER)
            engines.left(former)
            latter = await joined(engines, replace(SCHEDULER, launch="another"))
            await letting_go(engines, 1)
            assert shown()
            engines.left(latter)
            await letting_go(engines, 0)
            assert not shown()

    asyncio.run(run())


async def letting_go(engines: EngineRoom, left: int) -> None:
    while len(list(engines)) > left:  # noqa: ASYNC110 - a turn or two of the loop
        await asyncio.sleep(0)


async def offered(engines: EngineRoom, pool: Pool, rank: int = 0) -> tuple[EngineSession, bytes]:
    session = await joined(engines, replace(WORKER, rank=rank))
    pool_id = engines.offer(session, os.dup(pool.fd), pool.nbytes, os.getuid())
    engines.item(session, DescribePool(pool_id, CUT))
    return session, pool_id


async def end_of(session: EngineSession) -> Fault:
    with pytest.raises(KvpushError) as raised:
        await session.ended()
    return raised.value.fault()


@pytest.mark.parametrize("error", [OSError("too many open files"), MemoryError()], ids=repr)
def test_a_worker_whose_pool_can_not_be_mapped_hears_so_whatever_the_reason(
    metrics: Metrics, error: Exception
) -> None:
    async def run() -> None:
        pool, mapper = Pool.create(CUT.pool_bytes, "test"), Mapper()
        mapper.error = error
        async with room(mapper, metrics) as engines:
            session, _ = await offered(engines, pool)
            assert repr(error) in (await end_of(session)).detail
            engines.left(session)
        pool.close()

    asyncio.run(run())


def test_pools_are_mapped_again_though_one_of_them_can_not_be(metrics: Metrics) -> None:
    class Picky(Mapper):
        """Refuses one."""

        refused = b""

        async def map_pool(self, pool_id: bytes, fd: int, layout: Layout) -> None:
            if pool_id == self.refused:
                raise OSError("a fault of a test")

    async def run() -> None:
        pool, mapper = Pool.create(CUT.pool_bytes, "test"), Picky()
        async with room(mapper, metrics) as engines:
            session, pool_id = await offered(engines, pool)
            other, other_id = await offered(engines, pool, rank=1)
            assert await session.next_events() == [PoolReady(pool_id)]
            assert await other.next_events() == [PoolReady(other_id)]
            mapper.refused = pool_id
            engines.forget_mappings()
            await engines.map_again()
            assert (await end_of(session)).reason is Reason.UNSPECIFIED
            assert await other.next_events() == [PoolReady(other_id)]
        pool.close()

    asyncio.run(run())
