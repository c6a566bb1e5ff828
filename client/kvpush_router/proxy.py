# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: every path of the OpenAI API, passed through."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from multidict import CIMultiDict

from kvpush_router.answer import Answer, end_to_end, refusal
from kvpush_router.dispatch import Dispatch, NoEngine, PrefillLeg
from kvpush_router.engine import Engine, Fleet
from kvpush_router.journal import Entry, Journal
from kvpush_router.legs import mint_transfer_id

TRANSFER_HEADER = "x-kvpush-transfer-id"
"""Names, in an answer, the transfer that brought its KV: `kvpushctl transfers ID` shows it."""

LINGER_SECONDS = 2.0
"""So long a prefill leg may outlive its decode leg, so that its answer can still be learned from."""

MAX_BODY_BYTES = 256 << 20
GENERATING = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """Answers clients out of two fleets of engines."""

    def __init__(self, prefill: Fleet, decode: Fleet, journal: Journal) -> None:
        self._prefill = prefill
        self._decode = decode
        self._journal = journal
        self._sessions: list[ClientSession] = []
        self._lingering: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """The application. Serve it with handler_cancellation, so that a client's leaving ends its legs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._run_session)
        for path in GENERATING:
            app.router.add_post(path, self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    async def _run_session(self, _: web.Application) -> AsyncIterator[None]:
        # No limit on connections: the engines do the queueing. No total timeout: a long answer is no error.
        timeout = ClientTimeout(total=None, sock_connect=5)
        # vLLM closes a connection that was idle for 5 s: let go of it first, never send into a close.
        connector = TCPConnector(limit=0, keepalive_timeout=2)
        async with ClientSession(connector=connector, timeout=timeout) as session:
            self._sessions.append(session)
            yield
            for task in self._lingering:
                task.cancel()
            if self._lingering:
                await asyncio.wait(self._lingering)
            self._sessions.remove(session)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        entry = Entry(
            path=request.path,
            request_id=request.headers.get("X-Request-Id") or secrets.token_hex(16),
            transfer_id=mint_transfer_id(),
        )
        began = asyncio.get_running_loop().time()
        try:
            return await self._dispatch(request, entry, began)
        finally:
            entry.total_ms = _since(began)
            self._journal.write(entry)

    async def _dispatch(self, request: web.Request, entry: Entry, began: float) -> web.StreamResponse:
        try:
            body: Any = json.loads(await request.read())
        except ValueError as error:
            entry.status = 400
            return refusal(400, f"the body is not JSON: {error}", "BadRequestError")
        if not isinstance(body, dict):
            entry.status = 400
            return refusal(400, "the body is not a JSON object", "BadRequestError")
        headers = end_to_end(request.headers)
        headers["X-Request-Id"] = entry.request_id
        headers["Content-Type"] = "application/json"

        def started() -> None:
            entry.first_byte_ms = _since(began)

        async with Dispatch(
            self._sessions[0], self._prefill, self._decode, headers, entry, self._linger
        ) as dispatch:
            try:
                answer = await dispatch.open(body)
            except NoEngine as error:
                entry.status, entry.why = 502, str(error)
                return refusal(502, str(error), "BadGatewayError")
            entry.status = answer.response.status
            extra = {"X-Request-Id": entry.request_id}
            if entry.mode != "alone":
                extra[TRANSFER_HEADER] = entry.transfer_id
            return await self._relay(request, answer, extra, entry, started)

    def _linger(self, leg: PrefillLeg) -> None:
        """Lets a leg whose request has been answered end by itself for a while, not keeping the client."""

        async def end() -> None:
            try:
                await asyncio.wait({leg}, timeout=LINGER_SECONDS)
            finally:
                leg.cancel()
            await asyncio.wait({leg})
            if not leg.cancelled() and (error := leg.exception()) is not None:
                self._journal.note("late_prefill", why=str(error))

        task = asyncio.create_task(end())
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def _relay(
        self,
        request: web.Request,
        answer: Answer,
        extra: dict[str, str],
        entry: Entry,
        started: Callable[[], None],
    ) -> web.StreamResponse:
        try:
            return await answer.relay(request, extra, started)
        except (ClientError, ConnectionResetError) as error:
            # The status is out; all that can still be said is that the answer is not whole.
            entry.why = f"broke off: {error or type(error).__name__}"
            answer.close()
            if request.transport is not None:
                request.transport.abort()
            raise

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """200 as soon as one decode engine is well: it can answer without any prefill engine."""
        well = await asyncio.gather(*(self._is_well(engine) for engine in self._decode.engines))
        if any(well):
            return web.Response(status=200)
        return refusal(503, "no decode engine is well", "ServiceUnavailableError")

    async def _is_well(self, engine: Engine) -> bool:
        try:
            timeout = ClientTimeout(total=5)
            async with self._sessions[0].get(engine.url + "/health", timeout=timeout) as response:
                return response.status == 200
        except (ClientError, OSError, TimeoutError):
            return False

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """Any other path goes to a decode engine as it is."""
        engine = self._decode.pick(asyncio.get_running_loop().time())
        if engine is None:
            return refusal(502, "there is no decode engine", "BadGatewayError")
        headers: CIMultiDict[str] = end_to_end(request.headers)
        with engine.working():
            try:
                response = await self._sessions[0].request(
                    request.method, engine.url + request.path_qs, headers=headers, data=await request.read()
                )
                answer = Answer(response, await response.content.readany())
            except (ClientError, OSError, TimeoutError) as error:
                return refusal(502, f"{engine.url} does not answer: {error}", "BadGatewayError")
            return await answer.relay(request, {}, lambda: None)


def _since(began: float) -> float:
    return round((asyncio.get_running_loop().time() - began) * 1000, 1)
