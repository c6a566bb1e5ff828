# SPDX-License-Identifier: Apache-2.0
"""`python -m testing.faults.daemon`: kvpushd with points at all that it talks through, its mover too."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvpush_client._proto import engine_pb2
from kvpushd.__main__ import main
from kvpushd.daemon import Parts, run
from kvpushd.errors import Unreachable
from kvpushd.rpc.admin import AdminService
from kvpushd.rpc.engine import EngineService
from kvpushd.rpc.fds import FdService
from kvpushd.rpc.links import Links
from kvpushd.rpc.peer import PeerService
from testing.faults import relay
from testing.faults.catalog import DAEMON, admin_methods
from testing.faults.points import Broken, Points
from testing.faults.rules import Act
from testing.faults.streams import Stream


def _unreachable(error: Broken) -> Unreachable:
    return Unreachable(str(error))


def _lost(error: Broken) -> grpc.aio.AioRpcError:
    """What gRPC raises where a connection breaks."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, str(error), None)


class FaultyEngineService(EngineService):
    """Sessions that pass "session.*"."""

    def __init__(self, points: Points, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._points = points

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """As the inner one."""
        await super().Session(request_iterator, Stream(context, self._points, "session", _unreachable))


class FaultyPeerService(PeerService):
    """Links of peers that pass "peer.*"."""

    def __init__(self, points: Points, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._points = points

    async def Link(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """As the inner one."""
        await super().Link(request_iterator, Stream(context, self._points, "peer", _unreachable))


class FaultyLinks(Links):
    """Links to peers that pass "peer.*"."""

    def __init__(self, points: Points, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._points = points

    def _call(self, channel: grpc.aio.Channel) -> Any:
        return Stream(super()._call(channel), self._points, "peer", _lost)


class FaultyFdService(FdService):
    """Offers that pass "fds.recv.PoolOffer" and answers that pass "fds.send.PoolAnswer": one that is lost, or
    fails, closes its connection without an answer."""

    def __init__(self, points: Points, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._points = points

    async def _attend(self, connection: socket.socket) -> None:
        rule = self._points.strikes("fds.recv.PoolOffer", "before")
        try:
            if rule is not None:
                await self._points.endure(rule)
            if rule is None or rule.act is not Act.DROP:
                await super()._attend(connection)
        except Broken as error:
            self._sparing.warning("broke", "a connection to fd.sock broke", error=str(error))

    async def _send(self, connection: socket.socket, answer: engine_pb2.PoolAnswer) -> None:
        rule = self._points.strikes("fds.send.PoolAnswer", "before")
        try:
            if rule is not None:
                await self._points.endure(rule)
        except Broken as error:
            raise OSError(str(error)) from error
        if rule is None or rule.act is not Act.DROP:
            await super()._send(connection, answer)


class FaultyAdminService(AdminService):
    """Calls that pass "admin.recv.METHOD" and, with their answer, "admin.send.METHOD"."""

    def __init__(self, points: Points, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._points = points
        for name in admin_methods():
            setattr(self, name, partial(self._answer, name, getattr(self, name)))

    async def _answer(
        self, name: str, inner: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any
    ) -> Any:
        await self._pause(f"admin.recv.{name}", context)
        answer = await inner(request, context)
        await self._pause(f"admin.send.{name}", context)
        return answer

    async def _pause(self, point: str, context: Any) -> None:
        """What is lost, or fails, ends the call as a connection's end would."""
        rule = self._points.strikes(point, "before")
        try:
            if rule is not None:
                await self._points.endure(rule)
                if rule.act is Act.DROP:
                    raise Broken(f"a fault of a test: {point} is lost")
        except Broken as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def parts(points: Points) -> Parts:
    """A daemon's, with points at all of them."""
    return Parts(
        engines=partial(FaultyEngineService, points),
        fds=partial(FaultyFdService, points),
        peers=partial(FaultyPeerService, points),
        links=partial(FaultyLinks, points),
        admin=partial(FaultyAdminService, points),
        mover=partial(relay.start, points),
    )


if __name__ == "__main__":
    found = Points.of_environment(DAEMON, os.environ)
    sys.exit(main(run=lambda settings: run(settings, parts(found))))
