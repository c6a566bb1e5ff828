# SPDX-License-Identifier: Apache-2.0
"""The client's session with faults on its stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvpush_client._proto import engine_pb2
from kvpush_client.items import Identity, Item
from kvpush_client.layout import Layout
from kvpush_client.link import DAEMON_SILENCE, Link
from kvpush_client.pool import Pool
from kvpush_client.session import Session
from kvpush_client.wire import Malformed
from testing.faults.parts import parts, same
from testing.faults.points import Broken, Lane, Points

LINK = "session"


class FaultyLink(Link):
    """A link whose messages pass the points "session.send.*" and "session.recv.*"."""

    def __init__(
        self,
        points: Points,
        socket: Path,
        identity: Identity,
        unsayable: Callable[[Item, Malformed], None],
        silence: float,
    ) -> None:
        self._points = points
        self._over = threading.Event()
        super().__init__(socket, identity, unsayable, silence)
        self._responses = self._received(self._responses)

    def _requests(self) -> Iterator[engine_pb2.SessionRequest]:
        lane: Lane[Any] = Lane()
        for message in super()._requests():
            for name, whole in parts(message):
                try:
                    yield from self._passed("send", name, whole, lane)
                    self._pause("send", name, "after")
                except Broken:
                    self.cancel()
                    return

    def _received(self, responses: Iterator[Any]) -> Iterator[Any]:
        lane: Lane[Any] = Lane()
        for message in responses:
            for name, whole in parts(message):
                try:
                    yield from self._passed("recv", name, whole, lane)
                    self._pause("recv", name, "after")
                except Broken:
                    self.cancel()  # and the next one raises what gRPC says to that
                    break

    def _passed(self, way: str, name: str, whole: Any, lane: Lane[Any]) -> Iterator[Any]:
        rule = self._points.strikes(f"{LINK}.{way}.{name}", "before")
        if rule is not None:
            self._points.suffer(rule, self._over.is_set)
        return lane.passes(whole, rule, same)

    def _pause(self, way: str, name: str, when: str) -> None:
        rule = self._points.strikes(f"{LINK}.{way}.{name}", when)
        if rule is not None:
            self._points.suffer(rule, self._over.is_set)

    def cancel(self) -> None:
        """As the inner one; what hangs goes on."""
        self._over.set()
        super().cancel()

    def close(self) -> None:
        """As the inner one; what hangs goes on."""
        self._over.set()
        super().close()


class FaultySession(Session):
    """A session over faulty links."""

    def __init__(
        self,
        points: Points,
        runtime_dir: Path,
        identity: Identity,
        pool: Pool | None = None,
        layout: Layout | None = None,
        daemon_silence: float = DAEMON_SILENCE,
    ) -> None:
        super().__init__(runtime_dir, identity, pool, layout, daemon_silence, partial(FaultyLink, points))
