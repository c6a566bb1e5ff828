# SPDX-License-Identifier: Apache-2.0
"""Which points there are, read off the protos and the transport's contract, and what can go wrong at each.

A message's point is "LINK.send.MESSAGE" or "LINK.recv.MESSAGE", as the process sees it that has the point; a
call's is "nixl.METHOD" (or "local.METHOD", for copies within a node), and "nixl.completion" is what `poll`
gives out. Agents' notices are messages, too: "notice.send.NOTICE" and "notice.recv.NOTICE".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

from kvpush_client._proto import admin_pb2, engine_pb2, mover_pb2, peer_pb2
from kvpushd.mover.transport.notices import Notice
from testing.faults.rules import Act, Rule

CLIENT, DAEMON, MOVER = "client", "daemon", "mover"

CARRIER_CALLS = ("register", "deregister", "post", "inspect", "poll")
WAY_CALLS = ("open_inlet", "close_inlet", "open_outlet", "close_outlet", "cut_outlet")
TRANSPORT_CALLS = (*CARRIER_CALLS, *WAY_CALLS, "progress")
COMPLETION = "completion"
RAISING_CALLS = ("register", "open_inlet", "open_outlet")
"""Whose contract lets them fail: of the others nobody hears that they failed once they are made."""
TELLING_CALLS = ("open_inlet",)
"""Whose result can be lost."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place where something can go wrong, in one kind of process."""

    name: str
    process: str

    def allows(self, when: str, act: Act) -> bool:
        """Whether this can go wrong there."""
        family, _, what = self.name.partition(".")
        if when == "after":
            return self._allows_after(family, what, act)
        if family in ("nixl", "local") and what != COMPLETION:
            # Only writes can overtake each other.
            return act is not Act.REORDER or what == "post"
        if family == "notice":
            # What is held back would hold on to its agent; and nobody is told that he did not hear.
            return act is not Act.REORDER and (act is not Act.FAIL or what.startswith("send."))
        if family in ("admin", "fds"):
            return act not in (Act.REPEAT, Act.REORDER)  # one question, one answer
        return True

    @staticmethod
    def _allows_after(family: str, what: str, act: Act) -> bool:
        """What has passed has passed: it can't be lost, doubled or swapped; what follows can be late."""
        if family in ("admin", "fds", "notice") or what == COMPLETION or act in (Act.REPEAT, Act.REORDER):
            return False
        if act is Act.DROP:
            return what in TELLING_CALLS and family in ("nixl", "local")
        return act is not Act.FAIL or family not in ("nixl", "local") or what in RAISING_CALLS


def points() -> list[Point]:
    """All there are, in a stable order."""
    return list(_points())


def check(rule: Rule) -> None:
    """Raises ValueError where a rule can happen nowhere."""
    if not any(
        rule.is_at(point.name, rule.when)
        and rule.process in (None, point.process)
        and point.allows(rule.when, rule.act)
        for point in points()
    ):
        raise ValueError(
            f"{rule.act} {rule.when} {rule.point} in {rule.process or 'any process'} can happen nowhere: "
            f"points like it are {[p.name for p in points() if fnmatchcase(p.name, f'*{rule.point[-6:]}*')]}"
        )


def _points() -> Iterator[Point]:
    receiver = ["PeerHello", *_kinds(peer_pb2.ReceiverItem)]
    sender = ["PeerHello", *_kinds(peer_pb2.SenderItem)]
    for message in dict.fromkeys([*receiver, *sender]):
        yield Point(f"peer.send.{message}", DAEMON)
        yield Point(f"peer.recv.{message}", DAEMON)
    for message in ["Hello", *_kinds(engine_pb2.EngineItem)]:
        yield Point(f"session.send.{message}", CLIENT)
        yield Point(f"session.recv.{message}", DAEMON)
    for message in ["Welcome", *_kinds(engine_pb2.EngineEvent)]:
        yield Point(f"session.send.{message}", DAEMON)
        yield Point(f"session.recv.{message}", CLIENT)
    yield Point("fds.recv.PoolOffer", DAEMON)
    yield Point("fds.send.PoolAnswer", DAEMON)
    for message in _kinds(mover_pb2.MoverCommand):
        yield Point(f"mover.send.{message}", DAEMON)
        if message != mover_pb2.StopMover.DESCRIPTOR.name:
            yield Point(f"mover.recv.{message}", MOVER)
    for message in _kinds(mover_pb2.MoverReport):
        yield Point(f"mover.send.{message}", MOVER)
        yield Point(f"mover.recv.{message}", DAEMON)
    for method in admin_methods():
        yield Point(f"admin.recv.{method}", DAEMON)
        yield Point(f"admin.send.{method}", DAEMON)
    for notice in get_args(Notice):
        yield Point(f"notice.send.{notice.__name__}", MOVER)
        yield Point(f"notice.recv.{notice.__name__}", MOVER)
    for call in (*TRANSPORT_CALLS, COMPLETION):
        yield Point(f"nixl.{call}", MOVER)
    for call in (*CARRIER_CALLS, COMPLETION):
        yield Point(f"local.{call}", MOVER)


def admin_methods() -> list[str]:
    """Of the admin service."""
    return [method.name for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods]


def _kinds(message: Any) -> list[str]:
    """Names of the messages that its one oneof may hold."""
    (oneof,) = message.DESCRIPTOR.oneofs
    return [field.message_type.name for field in oneof.fields]
