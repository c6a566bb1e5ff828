# SPDX-License-Identifier: Apache-2.0
"""`python -m testing.faults.mover`: a mover of a test build. Started as a daemon starts kvpushd.mover."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from typing import Any

from kvpush_client._proto import mover_pb2
from kvpushd.mover import process
from kvpushd.mover.link import Link, LinkClosed
from kvpushd.mover.mover import Mover, Reports
from kvpushd.mover.transport.local import LocalCarrier
from kvpushd.mover.transport.nixl import NixlTransport
from testing.faults.catalog import MOVER
from testing.faults.notices import FaultyAgents
from testing.faults.parts import name_of, same
from testing.faults.points import Broken, Lane, Points
from testing.faults.rules import Act, Rule
from testing.faults.transport import FaultyCarrier, FaultyTransport

Command = tuple[mover_pb2.MoverCommand, int | None]


class FaultyLink(Link):
    """A mover's end whose reports pass the points "mover.send.*"."""

    def __init__(self, points: Points, end: socket.socket) -> None:
        super().__init__(end)
        self._points = points
        self._reports: Lane[bytes] = Lane()

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """As the inner one; where it breaks, the link is closed, as by the daemon's end."""
        point = f"mover.send.{name_of(mover_pb2.MoverReport.FromString(message))}"
        try:
            rule = _pause(self._points, point, "before")
            for passed in self._reports.passes(message, rule, same):
                super().send(passed, descriptor)
            _pause(self._points, point, "after")
        except Broken as error:
            raise LinkClosed from error


class FaultyMover(Mover):
    """A mover whose commands pass the points "mover.recv.*"."""

    def __init__(self, points: Points, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._points = points
        self._commands: Lane[Command] = Lane()

    def handle(self, command: mover_pb2.MoverCommand, descriptor: int | None = None) -> Reports:
        """As the inner one; where it breaks, the link is closed, as by the daemon's end."""
        point = f"mover.recv.{name_of(command)}"
        came = (command, descriptor)
        reports: Reports = []
        try:
            rule = _pause(self._points, point, "before")
            if rule is not None and rule.act is Act.DROP and came[1] is not None:
                os.close(came[1])
            for passed in self._commands.passes(came, rule, _copy):
                reports += super().handle(*passed)
            _pause(self._points, point, "after")
        except Broken as error:
            raise LinkClosed from error
        return reports


def _pause(points: Points, point: str, when: str) -> Rule | None:
    rule = points.strikes(point, when)
    if rule is not None:
        points.suffer(rule)
    return rule


def _copy(command: Command) -> Command:
    return command[0], None if command[1] is None else os.dup(command[1])


def _transport(points: Points, agent: str) -> FaultyTransport:
    return FaultyTransport(NixlTransport(agent, partial(FaultyAgents, points)), points, "nixl")


def parts(points: Points) -> process.Parts:
    """A mover's, with points at all of them."""
    return process.Parts(
        link=partial(FaultyLink, points),
        mover=partial(FaultyMover, points),
        local=lambda: FaultyCarrier(LocalCarrier(), points, "local"),
        transport=partial(_transport, points),
    )


def main() -> int:
    """A mover's process, with the points of its environment's board."""
    return process.main(parts=parts(Points.of_environment(MOVER, os.environ)))


if __name__ == "__main__":
    sys.exit(main())
