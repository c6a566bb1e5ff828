# SPDX-License-Identifier: Apache-2.0
"""The fault points that a scenario strikes, and the phase in which a transfer comes by there afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from testing.chaos.scenario import Phase, Point

CLIENT, DAEMON, MOVER = "client", "daemon", "mover"
HANG = 2.0
"""Seconds of a hang, shorter than the silence after which a process counts as dead."""
DELAY = 0.3

MESSAGE = ("drop", "delay", "repeat", "reorder", "fail", "hang", "exit")
CALL = ("delay", "repeat", "fail", "hang", "exit")

# Phase, point, process, node: in that phase the message, or the call, is yet to come.
PLACES: Sequence[tuple[Phase, str, str, str]] = (
    (Phase.UNRESERVED, "session.send.Reserve", CLIENT, "d"),
    (Phase.UNRESERVED, "session.recv.Reserve", DAEMON, "d"),
    (Phase.UNRESERVED, "peer.send.Announce", DAEMON, "d"),
    (Phase.UNRESERVED, "peer.recv.Announce", DAEMON, "p"),
    (Phase.ANNOUNCED, "session.send.Handoff", CLIENT, "p"),
    (Phase.ANNOUNCED, "session.recv.Handoff", DAEMON, "p"),
    (Phase.ANNOUNCED, "peer.send.SenderMatched", DAEMON, "p"),
    (Phase.ANNOUNCED, "peer.recv.SenderMatched", DAEMON, "d"),
    (Phase.ANNOUNCED, "session.send.Matched", DAEMON, "p"),
    (Phase.ANNOUNCED, "session.recv.Matched", CLIENT, "p"),
    (Phase.QUEUED, "session.send.Advance", CLIENT, "p"),
    (Phase.QUEUED, "session.recv.Advance", DAEMON, "p"),
    (Phase.QUEUED, "peer.send.SenderMoving", DAEMON, "p"),
    (Phase.QUEUED, "peer.recv.SenderMoving", DAEMON, "d"),
    (Phase.QUEUED, "nixl.post", MOVER, "p"),
    (Phase.BETWEEN, "mover.send.PostWrite", DAEMON, "p"),
    (Phase.BETWEEN, "mover.recv.PostWrite", MOVER, "p"),
    (Phase.BETWEEN, "nixl.post", MOVER, "p"),
    (Phase.BETWEEN, "nixl.completion", MOVER, "p"),
    (Phase.BETWEEN, "nixl.progress", MOVER, "d"),
    (Phase.BETWEEN, "mover.send.WriteEnded", MOVER, "p"),
    (Phase.BETWEEN, "mover.recv.WriteEnded", DAEMON, "p"),
    (Phase.SEALED, "nixl.completion", MOVER, "p"),
    (Phase.SEALED, "nixl.progress", MOVER, "d"),
    (Phase.SEALED, "peer.send.SenderLanded", DAEMON, "p"),
    (Phase.SEALED, "peer.recv.SenderLanded", DAEMON, "d"),
    (Phase.SEALED, "session.send.ReservationEnded", DAEMON, "d"),
    (Phase.SEALED, "session.recv.ReservationEnded", CLIENT, "d"),
    (Phase.SEALED, "session.send.HandoffEnded", DAEMON, "p"),
    (Phase.SEALED, "session.recv.HandoffEnded", CLIENT, "p"),
)


def strikes() -> Iterator[tuple[Phase, Point]]:
    """Every act at every place where it can happen."""
    for phase, point, process, node in PLACES:
        for act in CALL if point.startswith("nixl.") else MESSAGE:
            seconds = {"hang": HANG, "delay": DELAY}.get(act, 0.0)
            yield phase, Point(point, "before", act, process, node, seconds=seconds)
