# SPDX-License-Identifier: Apache-2.0
"""The daemon's end of a mover's link, with faults in between: two threads, one for each way."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpush_client._proto import mover_pb2
from kvpushd.mover.child import MoverProcess, MoverSettings
from kvpushd.mover.link import Letter, Link, LinkClosed
from testing.faults.parts import name_of
from testing.faults.points import Broken, Lane, Points
from testing.faults.rules import Act

MODULE = "testing.faults.mover"


def start(points: Points, settings: MoverSettings, pass_fds: Sequence[int]) -> tuple[Link, MoverProcess]:
    """Starts a mover of a test build; what is said on the link passes "mover.send.*" and "mover.recv.*"."""
    far, process = MoverProcess.start(replace(settings, module=MODULE), pass_fds)
    near, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    Relay(points, Link(near), far)
    return Link(ours), process


class Relay:
    """Passes messages on between the daemon's link and the mover's, until either closes."""

    def __init__(self, points: Points, near: Link, far: Link) -> None:
        self._points = points
        self._over = threading.Event()
        self._links = (near, far)
        ways = ((near, far, "send", mover_pb2.MoverCommand), (far, near, "recv", mover_pb2.MoverReport))
        self._ways = [
            threading.Thread(target=self._carry, args=way, name=f"relay {way[2]}", daemon=True)
            for way in ways
        ]
        for thread in self._ways:
            thread.start()
        threading.Thread(target=self._tidy, name="relay end", daemon=True).start()

    def _carry(self, source: Link, sink: Link, way: str, kind: Any) -> None:
        lane: Lane[Letter] = Lane()
        try:
            while True:
                _wait(source, select.POLLIN)
                for letter in source.receive():
                    name = name_of(kind.FromString(letter[0]))
                    self._pass(sink, f"mover.{way}.{name}", letter, lane)
        except (LinkClosed, Broken):
            self._over.set()
            for link in self._links:
                _shut(link)

    def _pass(self, sink: Link, point: str, letter: Letter, lane: Lane[Letter]) -> None:
        rule = self._points.strikes(point, "before")
        if rule is not None:
            self._points.suffer(rule, self._over.is_set)
        if rule is not None and rule.act is Act.DROP:
            _forget(letter)
        for message, descriptor in lane.passes(letter, rule, copied):
            sink.send(message, descriptor)
            while sink.pending:
                _wait(sink, select.POLLOUT)
                sink.flush()
            _forget((message, descriptor))
        rule = self._points.strikes(point, "after")
        if rule is not None:
            self._points.suffer(rule, self._over.is_set)

    def _tidy(self) -> None:
        for thread in self._ways:
            thread.join()
        for link in self._links:
            link.close()


def copied(letter: Letter) -> Letter:
    """The same, with a descriptor of its own."""
    return letter[0], None if letter[1] is None else os.dup(letter[1])


def _forget(letter: Letter) -> None:
    if letter[1] is not None:
        os.close(letter[1])


def _wait(link: Link, what: int) -> None:
    poller = select.poll()
    poller.register(link, what)
    poller.poll()


def _shut(link: Link) -> None:
    """Ends a link both ways; what was sent on it before can still be read at its other end."""
    with socket.socket(fileno=os.dup(link.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
