# SPDX-License-Identifier: Apache-2.0
"""The HTTP port: /metrics, /healthz, /readyz."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvpushd.errors import ConfigError
from kvpushd.logs import Sparing

MOST_CONNECTIONS = 64
"""Each takes a descriptor, and engines and peers need some, too. The oldest goes for one more: who only holds
on to connections keeps nobody else from asking."""


class _Refusals(logging.Filter):
    """Malformed requests, each of which aiohttp logs with a traceback, as sparing lines with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self._sparing = Sparing(structlog.get_logger("kvpushd.http"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets all others through: they are faults of ours."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        kind = type(error).__name__
        self._sparing.warning(kind, "request refused", kind=kind, reason=error.message[:200])
        return False


class HttpPort:
    """Serves what its two functions say at the moment of the request."""

    def __init__(
        self,
        registry: CollectorRegistry,
        refresh: Callable[[], None],
        problems: Callable[[], Sequence[str]],
    ) -> None:
        """`refresh` sets the gauges before a scrape; `problems` says why the node is not ready, in lines."""
        self._registry = registry
        self._refresh = refresh
        self._problems = problems
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises ConfigError if it can't."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        logger = logging.getLogger("kvpushd.http.server")
        if not logger.filters:
            logger.addFilter(_Refusals())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=logger)
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._accept, host, port, backlog=MOST_CONNECTIONS
            )
        except OSError as error:
            await self.close()
            raise ConfigError(f"can't listen on {host}:{port} (http): {error.strerror or error}") from error
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None
        transports = [each.transport for each in self._runner.server.connections]
        held = [each for each in transports if each is not None and not each.is_closing()]
        for each in held[: max(len(held) - MOST_CONNECTIONS + 1, 0)]:
            each.abort()  # to close it would wait for who asks and does not read the answers
        return self._runner.server()

    async def close(self) -> None:
        """Listens no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, request: web.Request) -> web.Response:
        self._refresh()
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        problems = self._problems()
        if problems:
            return web.Response(status=503, text="".join(f"{problem}\n" for problem in problems))
        return web.Response(text="ready\n")
