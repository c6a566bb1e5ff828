# SPDX-License-Identifier: Apache-2.0
"""Callers that want too much, or take nothing: each is told so, and the others go on."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpush_client import wire
from kvpush_client._proto import admin_pb2, engine_pb2, peer_pb2, peer_pb2_grpc, types_pb2
from kvpush_client.events import Reason, ReservationEnded, ReservationReleased
from kvpush_client.items import Identity, Role
from testing.node import Node
from testing.rank import BLOCK, FINGERPRINT, Engine, new_key
from tests.daemon.daemon_kit import Nodes, eventually, transfer
from tests.fuzz.doors.sender import SenderDoor
from tests.rpc.engine_kit import Client

pytestmark = pytest.mark.nixl

MANY = 5000
GROWTH = 48 << 20
LET_IN, REFUSED = 4096, 1024
"""Bytes that a greedy peer's reservation may take of the daemon's memory, and one that is refused, of which a
lease long is remembered why."""


def resident(node: Node) -> int:
    """Bytes of memory of its daemon."""
    return int(Path(f"/proc/{node.pid}/statm").read_text().split()[1]) * 4096


def test_thousands_of_reservations_that_nobody_fills_end_with_their_lease(nodes: Nodes) -> None:
    p, d = nodes.pair(blocks=8192, cell=16)
    transfer(p, d)

    def storm() -> None:
        keys = [new_key() for _ in range(MANY)]
        for n, key in enumerate(keys):
            d.reserve(key, p, [n], BLOCK, lease=3.0)
        eventually(lambda: nodes.d.status().held.reservations, lambda held: held > MANY // 2)
        ends = Counter[Reason]()
        waiting, held = set(keys), set[Any]()

        def hear() -> int:
            for event in d.scheduler.poll():
                if isinstance(event, ReservationEnded):
                    assert event.fault is not None
                    ends[event.fault.reason] += 1
                    waiting.remove(event.key)
                    if not event.released:
                        held.add(event.key)
                elif isinstance(event, ReservationReleased):
                    held.remove(event.key)
            return len(waiting) + len(held)

        eventually(hear, lambda left: not left)
        # When so many end at once, their sender may not say in time that nothing is under way: then the inlet
        # is closed, and with it all others of this peer end.
        assert ends.total() == MANY
        assert set(ends) <= {Reason.EXPIRED, Reason.FENCED}, ends

    storm()
    before = [resident(node) for node in (nodes.p, nodes.d)]
    storm()
    for node, was in zip((nodes.p, nodes.d), before, strict=True):
        assert resident(node) - was < GROWTH
    transfer(p, d, seed=2)


@contextmanager
def link(node: Node, hello: peer_pb2.PeerHello) -> Iterator[tuple[queue.SimpleQueue[Any], Any]]:
    """A peer's link: what is put is said, the call is what is heard. It is the node of `hello`."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        call = peer_pb2_grpc.PeerServiceStub(channel).Link(iter(said.get, None), timeout=60)
        said.put(peer_pb2.LinkRequest(hello=hello))
        assert next(call).hello.node == node.name
        yield said, call
        said.put(None)
        call.cancel()


def holding(nodes: Nodes, d: Engine) -> SenderDoor:
    """A node that D has an inlet for, until the test ends."""
    door = SenderDoor(d, holds=True)
    nodes.stack.callback(door.close)
    return door


def patient(hello: peer_pb2.PeerHello) -> peer_pb2.PeerHello:
    """The same node, that does not ask for beats."""
    asked = peer_pb2.PeerHello()
    asked.CopyFrom(hello)
    asked.silence_ms = 60_000
    return asked


def items(call: Any) -> Iterator[Any]:
    """What a peer hears, but for beats."""
    for message in call:
        for item in message.items:
            if not item.HasField("beat"):
                yield item


def announcing(described: peer_pb2.ReceiverEngine, count: int) -> Iterator[peer_pb2.LinkRequest]:
    """So many reservations of an engine that was described."""
    for at in range(0, count, 500):
        said = peer_pb2.LinkRequest()
        for n in range(at, min(at + 500, count)):
            said.items.add().announce.CopyFrom(
                peer_pb2.Announce(
                    key=wire.key_to_wire(new_key()),
                    incarnation=described.incarnation,
                    sender_engine_id=described.sender_engine_id,
                    end=BLOCK,
                    blocks=[types_pb2.Blocks(group=0, start=0, block_ids=[n % 256])],
                )
            )
        yield said


def test_a_peer_that_reserves_without_end_meets_the_limit_and_the_others_do_not(nodes: Nodes) -> None:
    p, d = nodes.pair()
    described = peer_pb2.ReceiverEngine()
    true = holding(nodes, d)
    described.CopyFrom(true.hold())
    described.engine_id, described.sender_engine_id = "greedy", p.engine_id
    limit, more = 6000, 2000
    with link(nodes.p, patient(true.hello)) as (said, call):
        heard = items(call)
        said.put(peer_pb2.LinkRequest(items=[peer_pb2.ReceiverItem(engine=described)]))
        assert not next(heard).engine_answer.HasField("fault")
        at_first = resident(nodes.p)
        for request in announcing(described, limit):
            said.put(request)
        costs = []
        for _ in range(4):
            for request in announcing(described, more):
                said.put(request)
            for _ in range(more):  # in order: all that was let in came before
                ended = next(heard).ended
                assert ended.fault.reason == types_pb2.REASON_OVER_LIMIT, ended
                assert ended.fault.detail.endswith(f"announced {limit} reservations")
            costs.append(resident(nodes.p) - at_first)
        assert costs[0] < limit * LET_IN + more * REFUSED
        assert costs[-1] - costs[0] < 3 * more * REFUSED
        transfer(p, d, seed=3)
    eventually(lambda: len([peer for peer in peers(nodes.p) if peer.node == "d"]) == 1)
    transfer(p, d, seed=4)


def peers(node: Node) -> list[Any]:
    return list(node.admin("ListPeers", admin_pb2.ListPeersRequest()).peers)


def test_a_peer_that_describes_engines_without_end_meets_the_limit(nodes: Nodes) -> None:
    p, d = nodes.pair()
    true = holding(nodes, d)
    usual = true.hold()
    with link(nodes.p, patient(true.hello)) as (said, call):
        heard, faults = items(call), Counter[int]()
        for n in range(80):
            described = peer_pb2.ReceiverEngine()
            described.CopyFrom(usual)
            described.engine_id, described.sender_engine_id = f"greedy-{n}", p.engine_id
            described.incarnation = n.to_bytes(16, "big")
            # One agent is not connected to twice, so most of these fail of that.
            said.put(peer_pb2.LinkRequest(items=[peer_pb2.ReceiverItem(engine=described)]))
            faults[next(heard).engine_answer.fault.reason] += 1
        assert faults[0] <= 64
        assert faults[0] < faults.total()
        transfer(p, d, seed=5)


def test_a_client_that_never_reads_is_cut_off_with_a_reason_and_the_others_go_on(folder: Path) -> None:
    with (
        Node("n", folder, limits__queued_items=1000) as node,
        Engine(node, "s") as s,
        Engine(node, "r") as r,
    ):
        deaf = Client(node.runtime_dir)
        deaf.welcome(Identity("deaf", "l", Role.SCHEDULER, fingerprint=FINGERPRINT))
        wrong = engine_pb2.SessionRequest(items=[engine_pb2.EngineItem()] * 1000)
        for _ in range(100):  # each is answered by an event that is not read
            deaf.send(wrong)
        eventually(lambda: "deaf" not in {e.engine_id for e in node.engines()})
        assert deaf.refusal() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVER_LIMIT")
        deaf.close()
        transfer(s, r, seed=6)
