# SPDX-License-Identifier: Apache-2.0
"""Engines as HTTP servers, as far as a router needs: tokens in and out, an abort where nobody waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from testing.clockwork.harness import Engine, EngineFailed, Request

PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Came:
    """A leg that a router sent."""

    engine: str
    request: Request
    params: dict[str, Any]
    at: float


class HttpFront:
    """Serves engines by name, on a thread of its own. `urls` says where; `came` what was asked, in order."""

    def __init__(self, engine: Callable[[str], Engine], names: Sequence[str]) -> None:
        """`engine` gives the engine that has the name now: another one after a restart."""
        self._engine = engine
        self.urls: dict[str, str] = {}
        self.came: list[Came] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-front", daemon=True)
        self._thread.start()
        self._runners = [self._call(self._serve(name)) for name in names]

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, name: str) -> web.AppRunner:
        app = web.Application(client_max_size=64 << 20)

        async def completions(request: web.Request) -> web.StreamResponse:
            return await self._complete(name, await request.json())

        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.urls[name] = f"http://{host}:{port}"
        return runner

    async def _complete(self, name: str, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params")
        try:
            engine = self._engine(name)
            request = engine.submit(body["prompt"], body.get("max_tokens", 1), params)
        except (EngineFailed, KeyError) as error:
            return web.json_response({"error": str(error)}, status=503)
        self.came.append(Came(name, request, params or {}, time.monotonic()))
        try:
            output = await asyncio.get_running_loop().run_in_executor(None, request.result, PATIENCE)
        except asyncio.CancelledError:
            # As vLLM's server does where a client has left.
            engine.abort(request.request_id)
            raise
        except EngineFailed as error:
            return web.json_response({"error": str(error)}, status=500)
        choice = {"index": 0, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        return web.json_response({"choices": [choice], "kv_transfer_params": output.kv_transfer_params})

    def close(self) -> None:
        """Ends the servers."""
        for runner in self._runners:
            self._call(runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
