# SPDX-License-Identifier: Apache-2.0
"""Faults on gRPC streams, whose messages hold a hello or a list of items: each of these is a message here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from grpc.aio import EOF  # type: ignore[attr-defined]

from testing.faults.parts import Part, parts, same
from testing.faults.points import Broken, Lane, Points
from testing.faults.rules import Rule


class Stream:
    """One end of a stream of grpc.aio's, as its two methods `read` and `write`."""

    def __init__(
        self, inner: Any, points: Points, link: str, broken: Callable[[Broken], BaseException]
    ) -> None:
        """`broken` makes what `read` and `write` raise where the stream breaks."""
        self._inner = inner
        self._points = points
        self._link = link
        self._broken = broken
        self._in: Lane[Any] = Lane()
        self._out: Lane[Any] = Lane()
        self._ready: deque[tuple[Any, str]] = deque()
        self._unread: deque[Part] = deque()
        self._given: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self) -> Any:
        """As the inner one."""
        if self._given is not None:
            name, self._given = self._given, None
            await self._pause(f"{self._link}.recv.{name}", "after")
        while not self._ready:
            if not self._unread:
                message = await self._inner.read()
                if message is EOF:
                    return EOF
                self._unread.extend(parts(message))
                continue
            name, whole = self._unread.popleft()
            rule = await self._pause(f"{self._link}.recv.{name}", "before")
            self._ready.extend((passed, name) for passed in self._in.passes(whole, rule, same))
        message, self._given = self._ready.popleft()
        return message

    async def write(self, message: Any) -> None:
        """As the inner one."""
        for name, whole in parts(message):
            rule = await self._pause(f"{self._link}.send.{name}", "before")
            for passed in self._out.passes(whole, rule, same):
                await self._inner.write(passed)
            await self._pause(f"{self._link}.send.{name}", "after")

    async def _pause(self, point: str, when: str) -> Rule | None:
        rule = self._points.strikes(point, when)
        if rule is not None:
            try:
                await self._points.endure(rule)
            except Broken as error:
                raise self._broken(error) from error
        return rule
