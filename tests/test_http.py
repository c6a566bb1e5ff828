# SPDX-License-Identifier: Apache-2.0
"""The HTTP port: real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily
from prometheus_client.metrics_core import Metric

from kvpushd.errors import ConfigError
from kvpushd.http import MOST_CONNECTIONS, HttpPort
from kvpushd.metrics import Holding, Metrics


class Node:
    """What the port asks."""

    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry(), "a", "1")
        self.problems: list[str] = []
        self.engines = 0

    def refresh(self) -> None:
        self.metrics.holding(Holding(engines=self.engines))


@asynccontextmanager
async def port(node: Node) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    http = HttpPort(node.metrics.registry, node.refresh, lambda: node.problems)
    bound = await http.open("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{bound}") as client:
            yield client, bound
    finally:
        await http.close()


def test_a_scrape_sees_what_is_held_at_its_moment() -> None:
    async def run() -> None:
        node = Node()
        async with port(node) as (client, _):
            for node.engines in (1, 2):
                async with client.get("/metrics") as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain")
                    assert f"\nkvpush_engines {float(node.engines)}\n" in await answer.text()

    asyncio.run(run())


def test_a_scraper_that_speaks_openmetrics_gets_it() -> None:
    async def run() -> None:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with port(Node()) as (client, _), client.get("/metrics", headers=accept) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await answer.text()).endswith("# EOF\n")

    asyncio.run(run())


def test_readiness_says_what_is_wrong_and_health_does_not_care() -> None:
    async def run() -> None:
        node = Node()
        async with port(node) as (client, _):
            async with client.get("/readyz") as answer:
                assert (answer.status, await answer.text()) == (200, "ready\n")
            node.problems = ["mover 0 does not answer", "draining"]
            async with client.get("/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "mover 0 does not answer\ndraining\n")
            async with client.get("/healthz") as answer:
                assert answer.status == 200

    asyncio.run(run())


def test_a_port_that_is_taken_is_said_by_name() -> None:
    async def run() -> None:
        node = Node()
        async with port(node) as (_, bound):
            other = HttpPort(node.metrics.registry, node.refresh, list)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{bound}"):
                await other.open("127.0.0.1", bound)

    asyncio.run(run())


def test_who_holds_on_to_connections_keeps_nobody_from_asking() -> None:
    async def run() -> None:
        async with port(Node()) as (client, bound):
            held = [await asyncio.open_connection("127.0.0.1", bound) for _ in range(2 * MOST_CONNECTIONS)]
            async with client.get("/healthz") as answer:
                assert answer.status == 200
            for reader, _ in held[: MOST_CONNECTIONS + 1]:
                assert await asyncio.wait_for(reader.read(), 30) == b"", "the oldest went"
            reader, writer = held[-1]
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 200")
            for _, writer in held:
                writer.close()

    asyncio.run(run())


def test_who_asks_and_does_not_read_goes_too() -> None:
    async def run() -> None:
        node = Node()
        for number in range(2000):  # so that an answer is more than a socket holds
            node.metrics.registry.register(_Text(number))
        http = HttpPort(node.metrics.registry, node.refresh, list)
        bound = await http.open("127.0.0.1", 0)
        stuck, writer = await asyncio.open_connection("127.0.0.1", bound, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        await asyncio.sleep(0.5)
        held = [await asyncio.open_connection("127.0.0.1", bound) for _ in range(MOST_CONNECTIONS + 8)]
        await asyncio.sleep(0.1)
        assert http._runner is not None
        assert http._runner.server is not None
        assert len(http._runner.server.connections) <= MOST_CONNECTIONS
        for _, each in [(stuck, writer), *held]:
            each.close()
        await http.close()

    asyncio.run(run())


class _Text:
    """A metric with a long text."""

    def __init__(self, number: int) -> None:
        self._name = f"number_{number}"

    def collect(self) -> list[Metric]:
        return [InfoMetricFamily(self._name, "x" * 2000, value={"text": "y" * 2000})]
