# SPDX-License-Identifier: Apache-2.0
"""A thief who is let in, and has copied every id of a transfer, changes nothing of it and gets nothing."""

from __future__ import annotations

import os
import queue
import secrets
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import trustme

from kvpush_client import fdsock, wire
from kvpush_client._proto import engine_pb2, peer_pb2, peer_pb2_grpc
from kvpush_client.events import Matched, Reason, ReservationEnded, ReservationReleased
from kvpush_client.items import Identity, Role, Sender
from kvpush_client.pool import Pool
from testing.node import DEADLINE, Node
from testing.rank import FINGERPRINT, Engine, layout, new_key
from tests.access.access_kit import ENGINE_ITEMS, RECEIVER_ITEMS, SENDER_ITEMS, WORKERS, Stolen, item
from tests.access.conftest import END, INTO, SENT, SETTINGS, Fleet
from tests.access.test_strangers import opening
from tests.daemon.daemon_kit import eventually, papers
from tests.rpc.engine_kit import Client

pytestmark = pytest.mark.nixl

MOMENTS = ("waiting", "matched")
MARK = engine_pb2.SessionRequest(items=[engine_pb2.EngineItem()])
"""An item that is answered at once: what was said before it has been heard."""


# --- another engine of the node --------------------------------------------------------------------------


class Thief:
    """An engine of its own right, with a pool, whose processes say what they like."""

    def __init__(self, node: Node) -> None:
        common: dict[str, Any] = {"fingerprint": FINGERPRINT}
        name, launch = f"thief-{secrets.token_hex(4)}", secrets.token_hex(8)
        self.scheduler, self.worker = Client(node.runtime_dir), Client(node.runtime_dir)
        self.scheduler.welcome(Identity(name, launch, Role.SCHEDULER, **common))
        token = self.worker.welcome(Identity(name, launch, Role.WORKER, **common)).token
        cut = layout(256)
        self.pool = Pool.create(cut.pool_bytes, name)
        fd, wake = (self.pool.fd, self.pool.nbytes), os.eventfd(0)
        self.pool_id, lifeline = fdsock.exchange(
            node.runtime_dir / "fd.sock", token, fd, timeout=DEADLINE, wake=wake
        )
        os.close(lifeline)
        os.close(wake)
        described = engine_pb2.DescribePool(pool_id=self.pool_id, layout=wire.layout_to_wire(cut))
        self.worker.send(engine_pb2.SessionRequest(items=[engine_pb2.EngineItem(describe_pool=described)]))
        assert next(self.worker.call).events[0].pool_ready.pool_id == self.pool_id

    def say(self, client: Client, said: Any) -> list[Any]:
        """Says an item; returns what is heard until it has been taken."""
        client.send(engine_pb2.SessionRequest(items=[said]))
        client.send(MARK)
        heard: list[Any] = []
        for answer in client.call:
            for event in answer.events:
                if event.rejected.fault.detail.startswith("the item is empty"):
                    return heard
                heard.append(event)
        raise AssertionError("the stream ended")

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def thief(fleet: Fleet) -> Iterator[Thief]:
    thief = Thief(fleet.v)
    yield thief
    thief.close()
    eventually(lambda: {e.engine_id for e in fleet.v.engines()} == {"s"})


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ENGINE_ITEMS)
def test_another_engine_of_the_node_touches_nothing(
    fleet: Fleet, thief: Thief, kind: str, moment: str
) -> None:
    key = fleet.open(moment)
    before = fleet.v.transfers(key.transfer_id)
    client = thief.worker if kind in WORKERS else thief.scheduler
    heard = thief.say(client, item(engine_pb2.EngineItem, kind, fleet.stolen(key)))
    after = [t for t in fleet.v.transfers(key.transfer_id) if t.half.engine_id == "s"]
    assert [(t.half.phase, t.half.blocks) for t in after] == [(t.half.phase, t.half.blocks) for t in before]
    fleet.finish(key, moment)
    if kind == "describe_pool":
        assert "not offered on fd.sock by this session" in heard[0].rejected.fault.detail
    if kind == "handoff":  # it opened one of its own, of a transfer of its own
        thief.say(thief.scheduler, engine_pb2.EngineItem(cancel=_cancel(key)))


def _cancel(key: Any) -> engine_pb2.Cancel:
    return engine_pb2.Cancel(key=wire.key_to_wire(key), side=engine_pb2.SIDE_SENDER)


def test_another_engine_s_first_token_is_not_its_to_tell(fleet: Fleet, thief: Thief) -> None:
    with Engine(fleet.v, "near") as near:
        key = new_key()
        near.reserve(key, fleet.s, INTO, END)
        fleet.s.send(key, SENT, END)
        assert near.wait_for(ReservationEnded, key).fault is None
        first = engine_pb2.FirstToken(key=wire.key_to_wire(key), unix_ns=1)
        thief.say(thief.scheduler, engine_pb2.EngineItem(first_token=first))
        assert {t.first_token_unix_ns for t in fleet.v.transfers(key.transfer_id)} == {0}
    eventually(lambda: not [e for e in fleet.v.engines() if e.engine_id == "near"])
    fleet.s.scheduler.poll()


def test_a_handoff_that_names_its_receiver_goes_to_nobody_else(fleet: Fleet) -> None:
    with Engine(fleet.v, "near") as near:
        key = new_key()
        fleet.s.scheduler.handoff(key, [], receiver_engine_id="r")
        near.reserve(key, fleet.s, INTO, END)
        end = near.wait_for(ReservationEnded, key)
        assert end.fault is not None
        assert end.fault.reason is Reason.FORBIDDEN
        fleet.s.hand_off(key, SENT)
        fleet.r.reserve(key, fleet.s, INTO, END)
        fleet.r.wait_for(Matched, key)
        fleet.s.wait_for(Matched, key)
        fleet.finish(key, "matched")
    eventually(lambda: not [e for e in fleet.v.engines() if e.engine_id == "near"])


@pytest.mark.parametrize("guess", ["another id", "another attempt"])
def test_a_guessed_id_gets_nothing(fleet: Fleet, guess: str) -> None:
    key = fleet.open("matched")
    with Engine(fleet.v, "near") as near:
        wrong = new_key() if guess == "another id" else type(key)(key.transfer_id, key.attempt + 1)
        near.reserve(wrong, fleet.s, INTO, END, lease=0.2)
        end = near.wait_for(ReservationEnded, wrong)
        assert end.fault is not None
        assert end.fault.reason in (Reason.EXPIRED, Reason.DUPLICATE)
        assert not near.read(INTO, 0, END).any()
        fleet.finish(key, "matched")
    eventually(lambda: not [e for e in fleet.v.engines() if e.engine_id == "near"])


# --- another incarnation ---------------------------------------------------------------------------------


def test_a_stream_of_an_ended_incarnation_says_nothing_more(fleet: Fleet) -> None:
    launch = secrets.token_hex(8)
    common: dict[str, Any] = {"fingerprint": FINGERPRINT, "world_size": 2, "local_ranks": 2}
    one, two = Client(fleet.v.runtime_dir), Client(fleet.v.runtime_dir)
    first = one.welcome(Identity("twice", launch, Role.WORKER, rank=0, **common))
    two.welcome(Identity("twice", launch, Role.WORKER, rank=1, **common))
    two.close()
    code, _ = one.refusal()
    assert code is grpc.StatusCode.UNAVAILABLE
    again = Client(fleet.v.runtime_dir)
    second = again.welcome(Identity("twice", launch, Role.WORKER, rank=0, **common))
    assert second.incarnation != first.incarnation
    assert second.token != first.token
    for client in (one, again):
        client.close()
    eventually(lambda: not [e for e in fleet.v.engines() if e.engine_id == "twice"])


# --- another node ----------------------------------------------------------------------------------------


@contextmanager
def link(fleet: Fleet, name: str = "e.nodes") -> Iterator[tuple[queue.SimpleQueue[Any], Any]]:
    """A link to V of a node with a certificate of its own: what is put is said, the call is what is heard."""
    made = fleet.authority.issue_cert(name)
    chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
    credentials = grpc.ssl_channel_credentials(
        fleet.authority.cert_pem.bytes(), made.private_key_pem.bytes(), chain
    )
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.secure_channel(f"127.0.0.1:{fleet.v.port}", credentials) as channel:
        call = peer_pb2_grpc.PeerServiceStub(channel).Link(iter(said.get, None), timeout=DEADLINE)
        said.put(opening(name))
        assert next(call).hello.node == "v.nodes"
        yield said, call
        said.put(None)
        call.cancel()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", RECEIVER_ITEMS)
def test_another_node_that_receives_touches_nothing(fleet: Fleet, kind: str, moment: str) -> None:
    key = fleet.open(moment)
    with link(fleet) as (said, call):
        stolen = item(peer_pb2.ReceiverItem, kind, fleet.stolen(key))
        said.put(peer_pb2.LinkRequest(items=[stolen]))  # type: ignore[list-item]
        if kind in ("engine", "announce"):
            answers = (i for message in call for i in message.items)
            answer = next(i for i in answers if not i.HasField("beat"))
            assert answer.engine_answer.fault.reason or answer.ended.fault.reason
        said.put(peer_pb2.LinkRequest(items=[peer_pb2.ReceiverItem()]))  # says nothing: the link ends
        with pytest.raises(grpc.RpcError) as raised:
            for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    fleet.finish(key, moment)


@pytest.mark.parametrize("agent", ["d.nodes-626262626262-in-1", "e.nodes-000000000000-in-1", "x", ""])
def test_another_nodes_agent_is_not_its_to_name(fleet: Fleet, agent: str) -> None:
    key = fleet.open("matched")
    with link(fleet) as (said, call):
        described = RECEIVER_ITEMS["engine"](fleet.stolen(key))
        assert isinstance(described, peer_pb2.ReceiverEngine)
        described.inlets[0].agent = agent
        said.put(peer_pb2.LinkRequest(items=[peer_pb2.ReceiverItem(engine=described)]))
        with pytest.raises(grpc.RpcError, match="is not of this node"):
            for _ in call:
                pass
    fleet.finish(key, "matched")


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("engine", "engine_id"),
        ("engine", "sender_engine_id"),
        ("engine", "agent"),
        ("announce", "sender_engine_id"),
        ("withdraw", "sender_engine_id"),
    ],
)
def test_names_that_are_too_long_to_be_kept_end_the_link(fleet: Fleet, kind: str, field: str) -> None:
    """What nobody could match is remembered by its name, as often as it is said."""
    with link(fleet) as (said, call):
        body = RECEIVER_ITEMS[kind](fleet.stolen(new_key()))
        where = body.inlets[0] if field == "agent" else body
        setattr(where, field, getattr(where, field) + "x" * 513)
        said.put(peer_pb2.LinkRequest(items=[peer_pb2.ReceiverItem(**{kind: body})]))
        with pytest.raises(grpc.RpcError, match="at most 512 are allowed"):
            for _ in call:
                pass


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_engine_of_another_node_that_bears_the_receivers_name_gets_nothing(
    fleet: Fleet, moment: str
) -> None:
    key = fleet.open(moment)
    with Node("e.nodes", fleet.folder, **SETTINGS, **papers(fleet.folder, fleet.authority, "e.nodes")) as e:
        with Engine(e, fleet.r.engine_id) as impostor:
            impostor.reserve(key, fleet.s, INTO, END)
            end = impostor.wait_for(ReservationEnded, key)
            assert end.fault is not None
            assert end.fault.reason is Reason.DUPLICATE
            assert "is on another node" in end.fault.detail
            assert not impostor.read(INTO, 0, END).any()
        fleet.finish(key, moment)
        eventually(lambda: e.status().held.engines == 0)


class Liar(peer_pb2_grpc.PeerServiceServicer):
    """A node that sends: it understands every engine, and then says what it is told to."""

    def __init__(self) -> None:
        self.announced: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.says: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.described: Any = None

    def Link(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802, the proto's name
        """One link."""
        next(request_iterator)
        yield peer_pb2.LinkResponse(hello=opening("e.nodes").hello)
        for request in request_iterator:
            for said in request.items:
                if said.HasField("engine"):
                    self.described = said.engine
                    yield from self._answers(said.engine)
                elif said.HasField("announce"):
                    self.announced.put(said.announce)
                    yield peer_pb2.LinkResponse(items=[self.says.get(timeout=DEADLINE)])
                    return

    @staticmethod
    def _answers(engine: Any) -> Iterator[peer_pb2.LinkResponse]:
        answer = peer_pb2.ReceiverEngineAnswer(
            incarnation=engine.incarnation, sender_engine_id=engine.sender_engine_id
        )
        yield peer_pb2.LinkResponse(items=[peer_pb2.SenderItem(engine_answer=answer)])


@contextmanager
def lying(authority: trustme.CA) -> Iterator[tuple[Liar, Sender]]:
    liar = Liar()
    made = authority.issue_cert("e.nodes", "127.0.0.1")
    chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
    credentials = grpc.ssl_server_credentials(
        [(made.private_key_pem.bytes(), chain)], authority.cert_pem.bytes(), require_client_auth=True
    )
    server = grpc.server(futures.ThreadPoolExecutor(4))
    peer_pb2_grpc.add_PeerServiceServicer_to_server(liar, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield liar, Sender("ghost", "127.0.0.1", port)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("incarnation", ["its own", "an old one"])
@pytest.mark.parametrize("kind", SENDER_ITEMS)
def test_another_node_that_sends_ends_nothing_that_it_does_not_send(
    fleet: Fleet, kind: str, incarnation: str
) -> None:
    """It was told the receiver's incarnation, with a reservation of its own; the other one it has copied."""
    key, bait = fleet.open("waiting"), new_key()
    with lying(fleet.authority) as (liar, ghost):
        fleet.r.reserve(bait, ghost, range(40, 44), END, lease=600)
        liar.announced.get(timeout=DEADLINE)
        stolen = fleet.stolen(key)
        if incarnation == "an old one":
            stolen = Stolen(key, b"o" * 16, "r", "s", b"", "", 0)
        liar.says.put(item(peer_pb2.SenderItem, kind, stolen))
        # Its last word, and with the link its own part ends; the other reservation waits as it did.
        end = fleet.r.wait_for(ReservationEnded, bait)
        assert end.fault is not None
        if not end.released:
            fleet.r.wait_for(ReservationReleased, bait)
    fleet.finish(key, "waiting")


# --- certificates that change ----------------------------------------------------------------------------


def test_certificates_are_replaced_under_two_running_nodes(fleet: Fleet) -> None:
    pids = fleet.v.pid, fleet.d.pid
    key = fleet.open("matched")
    renewed = trustme.CA()
    for name in ("v.nodes", "d.nodes"):
        papers(fleet.folder, renewed, name)
    fleet.finish(key, "matched")  # the link that is up lives
    with pytest.raises(grpc.RpcError), link(fleet):
        pass  # of the former authority
    former, fleet.authority = fleet.authority, renewed
    with link(fleet):
        pass
    for name in ("v.nodes", "d.nodes"):
        papers(fleet.folder, former, name)
    fleet.authority = former
    with link(fleet):
        pass
    assert (fleet.v.pid, fleet.d.pid) == pids
