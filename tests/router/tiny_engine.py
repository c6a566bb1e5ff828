# SPDX-License-Identifier: Apache-2.0
"""Tiny real HTTP engines, and the router in front of them, all on one event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import ClientSession, web

from kvpush_router.coordinates import Coordinates
from kvpush_router.engine import EngineSpec, Fleet
from kvpush_router.journal import Journal
from kvpush_router.proxy import Proxy

DEADLINE = 30.0
ASK = {"model": "m", "prompt": "a b c", "max_tokens": 7}


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


@dataclass
class Seen:
    """A request as an engine got it."""

    path: str
    headers: Mapping[str, str]
    body: Any
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


Answering: TypeAlias = Callable[[Seen], Mapping[str, Any]]


class TinyEngine:
    """Records what it gets; answers as it is told. Its gate is open unless a test closes it."""

    def __init__(self, answer: Answering | None = None, status: int = 200) -> None:
        self.answer = answer or (lambda seen: {"choices": [{"text": "hello"}]})
        self.status = status
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[Seen] = []
        self.url = ""
        self._came = asyncio.Condition()
        self._broken = False

    def breaks(self) -> None:
        """From now on a stream ends by a broken connection."""
        self._broken = True
        self.gate.set()

    async def wait_for(self, count: int) -> list[Seen]:
        async with asyncio.timeout(DEADLINE), self._came:
            await self._came.wait_for(lambda: len(self.seen) >= count)
        return self.seen

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        seen = Seen(request.path, request.headers, json.loads(text) if text else None)
        self.seen.append(seen)
        async with self._came:
            self._came.notify_all()
        try:
            if isinstance(seen.body, dict) and seen.body.get("stream"):
                return await self._stream(request)
            await self.gate.wait()
            return web.json_response(self.answer(seen), status=self.status, headers={"x-engine": "tiny"})
        except asyncio.CancelledError:
            seen.aborted = True
            raise
        finally:
            seen.ended.set()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"token": 1}\n\n')
        await self.gate.wait()
        if self._broken:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response


def prefill_answer(engine_id: str = "p0", port: int = 7766) -> Answering:
    def answer(seen: Seen) -> Mapping[str, Any]:
        asked = seen.body["kv_transfer_params"]
        return {
            "choices": [{"text": "x"}],
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": engine_id,
                "remote_host": "10.0.0.1",
                "remote_port": port,
                "remote_request_id": f"r{port}",
                "tp_size": 1,
                "transfer_id": asked["transfer_id"],
            },
        }

    return answer


def parallel_answer(count: int, *, base: str = "p", first: int = 0) -> Answering:
    """A data-parallel server's, which takes its engines in turn where no rank is asked for.

    Its engines are named from `first` on, as under vLLM's hybrid load balancing.
    """
    turns = itertools.count()

    def answer(seen: Seen) -> Mapping[str, Any]:
        asked = seen.headers.get("X-data-parallel-rank")
        rank = next(turns) % count if asked is None else int(asked)
        if rank >= count:
            text = f'{{"error": {{"message": "data_parallel_rank {rank} is out of range [0, {count})."}}}}'
            raise web.HTTPBadRequest(text=text)
        return prefill_answer(f"{base}_dp{first + rank}")(seen)

    return answer


@dataclass
class Bench:
    """A router with its engines, and a client's session."""

    client: ClientSession
    url: str
    log: list[dict[str, Any]]
    _logged: asyncio.Condition

    async def ask(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def lines(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(DEADLINE):
            while len(self.log) < count:
                async with self._logged:
                    await self._logged.wait()
        return self.log


class _Lines(logging.Handler):
    def __init__(self, log: list[dict[str, Any]], logged: asyncio.Condition) -> None:
        super().__init__()
        self._log, self._logged = log, logged
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self._log.append(json.loads(record.getMessage()))
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._logged:
            self._logged.notify_all()


async def _serve(app: web.Application, stack: AsyncExitStack) -> str:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


@asynccontextmanager
async def bench(
    prefill: Sequence[TinyEngine],
    decode: Sequence[TinyEngine],
    coordinates: Coordinates | None = None,
    dead_decode: Sequence[str] = (),
    dead_prefill: Sequence[str] = (),
) -> AsyncIterator[Bench]:
    """Everything started; everything stopped at the end. `dead_*` are URLs where nobody listens."""
    log: list[dict[str, Any]] = []
    logged = asyncio.Condition()
    logger = logging.Logger("router-under-test")
    logger.addHandler(_Lines(log, logged))
    async with AsyncExitStack() as stack:
        for engine in (*prefill, *decode):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", engine.handle)
            engine.url = await _serve(app, stack)
        proxy = Proxy(
            Fleet(
                [EngineSpec(url) for url in dead_prefill] + [EngineSpec(e.url, coordinates) for e in prefill]
            ),
            Fleet([EngineSpec(url) for url in dead_decode] + [EngineSpec(e.url) for e in decode]),
            Journal(logger),
        )
        url = await _serve(proxy.app(), stack)
        client = await stack.enter_async_context(ClientSession())
        yield Bench(client, url, log, logged)
