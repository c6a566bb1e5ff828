# SPDX-License-Identifier: Apache-2.0
"""Every listener of a daemon: what is said to it, and what must come of it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from kvpush_client import hello_wire
from kvpush_client._proto import admin_pb2, engine_pb2, peer_pb2
from kvpush_client.events import ReservationEnded, ReservationReleased, Side, TransferKey
from kvpush_client.items import Identity, Role, Sender
from kvpush_client.pool import Pool
from testing.node import DEADLINE, Node
from testing.rank import BLOCK, FINGERPRINT, Engine, layout, new_key
from tests.daemon.daemon_kit import eventually
from tests.fuzz.messages import saying

Saying = Sequence[bytes]
REASON_KEY = "kvpush-reason"
CORPUS = Path(__file__).parent / "corpus"
BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
"""What no answer to nonsense is: an exception of ours, a hang, a daemon that is gone."""


class Door(Protocol):
    """One listener."""

    name: str

    def sayings(self) -> st.SearchStrategy[Saying]:
        """What may be said."""

    def say(self, said: Saying) -> None:
        """Says it, waits for the end. Raises AssertionError where that is not an end with a reason."""


def corpus(door: str) -> list[Path]:
    """The entries of a door: hexadecimal, a message a line, after # what it is about."""
    return sorted((CORPUS / door).glob("*.txt"))


def read(entry: Path) -> list[bytes]:
    """What an entry says."""
    lines = (line.partition("#")[0].strip() for line in entry.read_text().splitlines())
    return [b"" if line == "-" else bytes.fromhex(line) for line in lines if line]


def shown(said: Saying) -> str:
    """As an entry of the corpus would have it."""
    return "\n".join(message.hex() or "-" for message in said)


def check(error: grpc.RpcError) -> None:
    """An end of a call that says why."""
    assert isinstance(error, grpc.Call)
    reason = dict(error.trailing_metadata() or ()).get(REASON_KEY, "")
    assert error.details(), error
    assert error.code() not in BAD or reason not in ("", "UNSPECIFIED"), error


def stream(target: str, method: str, said: Saying) -> None:
    """Says messages on a stream and ends it; whatever is answered is taken."""
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(method)(iter(said), timeout=DEADLINE)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            check(error)


class EngineDoor:
    """kvpushd.sock, as a scheduler, as a worker with a pool, or as nobody."""

    name = "engine"

    def __init__(self, node: Node) -> None:
        self._node = node
        self._target = f"unix:{node.runtime_dir}/kvpushd.sock"
        self._pool = Pool.create(layout(16).pool_bytes, "fuzz")

    def sayings(self) -> st.SearchStrategy[Saying]:
        items = st.lists(saying(engine_pb2.SessionRequest), max_size=6)
        hellos = st.sampled_from([b"scheduler", b"worker", b"pool"])
        return st.one_of(
            st.builds(lambda who, rest: [who, *rest], hellos, items),
            items.map(lambda rest: [b"nobody", *rest]),
        )

    def say(self, said: Saying) -> None:
        """The first message names who says the rest."""
        who, *rest = said
        if who == b"nobody":
            stream(self._target, "/kvpush.v1.EngineService/Session", rest)
            return
        role = Role.SCHEDULER if who == b"scheduler" else Role.WORKER
        identity = Identity(f"f-{secrets.token_hex(4)}", "l", role, fingerprint=FINGERPRINT)
        hello = engine_pb2.SessionRequest(hello=hello_wire.hello_to_wire(identity)).SerializeToString()
        if who != b"pool":
            stream(self._target, "/kvpush.v1.EngineService/Session", [hello, *rest])
            return
        self._with_pool(hello, rest)

    def _with_pool(self, hello: bytes, rest: Saying) -> None:
        """Its layouts are those of the pool that it has offered."""
        with grpc.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            welcomed: futures.Future[bytes] = futures.Future()

            def requests() -> Iterator[bytes]:
                yield hello
                pool_id = welcomed.result(DEADLINE)
                for data in rest:
                    yield _naming(data, pool_id, self._pool.nbytes)

            call = channel.stream_stream("/kvpush.v1.EngineService/Session")(requests(), timeout=DEADLINE)
            try:
                answer = engine_pb2.SessionResponse.FromString(next(call))
                welcomed.set_result(self._offer(answer.welcome.token))
                for _ in call:
                    pass
            except grpc.RpcError as error:
                check(error)

    def _offer(self, token: bytes) -> bytes:
        data = engine_pb2.PoolOffer(token=token, pool_bytes=self._pool.nbytes).SerializeToString()
        answer, fds = datagram(self._node.runtime_dir / "fd.sock", data, [self._pool.fd])
        for fd in fds:
            os.close(fd)
        return engine_pb2.PoolAnswer.FromString(answer).pool_id


def _naming(data: bytes, pool_id: bytes, nbytes: int) -> bytes:
    """The same message, but that its layouts are of this pool, where it can be read."""
    try:
        request = engine_pb2.SessionRequest.FromString(data)
    except Exception:  # noqa: BLE001, any other bytes go as they are
        return data
    for said in request.items:
        if said.HasField("describe_pool"):
            said.describe_pool.pool_id = pool_id
            said.describe_pool.layout.pool_bytes = nbytes
    return request.SerializeToString()


WAYS = 20
"""Links that describe an engine behind one and the same inlet, one after another."""


class PeerDoor:
    """The peer port, as a node that receives; and as one that is dialed, and sends."""

    name = "peer"

    def __init__(self, node: Node, true: SenderDoor) -> None:
        """`true` holds what the node says of an engine: the inlet is real."""
        self._target = f"127.0.0.1:{node.port}"
        self._true = true
        self._ways = 0

    def sayings(self) -> st.SearchStrategy[Saying]:
        requests = st.lists(saying(peer_pb2.LinkRequest), max_size=6)
        return st.one_of(
            requests.map(lambda rest: [b"hello", *rest]),
            requests.map(lambda rest: [b"described", *rest]),
            st.lists(saying(peer_pb2.LinkRequest), max_size=2).map(lambda rest: [b"raw", *rest]),
        )

    def say(self, said: Saying) -> None:
        """The first message says how far the link has come."""
        how, *rest = said
        hello = peer_pb2.PeerHello(
            protocol=1, node=f"f-{secrets.token_hex(4)}", boot=b"b" * 16, software="fuzz", silence_ms=10_000
        )
        described = self._true.hold() if how == b"described" else None
        if described is not None:
            hello = self._true.hello
        opening = [peer_pb2.LinkRequest(hello=hello).SerializeToString()]
        if how == b"raw":
            opening = []
        if described is not None:
            engine = peer_pb2.ReceiverEngine()
            engine.CopyFrom(described)
            engine.sender_engine_id = "s"
            item = peer_pb2.ReceiverItem(engine=engine)
            opening.append(peer_pb2.LinkRequest(items=[item]).SerializeToString())
        stream(self._target, "/kvpush.v1.PeerService/Link", [*opening, *rest])
        if self._true.described is not None:
            self._ways += 1
            if self._ways % WAYS == 0:
                self.rest()

    def rest(self) -> None:
        """Lets the inlet go: its agent keeps its own end of each connection that was made to it."""
        self._true.let_go()


class SenderDoor:
    """The daemon's own dialing: the node that it reaches says what it likes."""

    name = "sender"

    def __init__(self, receiver: Engine, *, holds: bool = False) -> None:
        """Or, if it `holds`, it says nothing, and the link stays up: what it was told of stays true."""
        self._receiver = receiver
        self._holds = holds
        self._says: Saying = ()
        self._let_go, self._gone = threading.Event(), threading.Event()
        self.described: peer_pb2.ReceiverEngine | None = None
        self.hello = peer_pb2.PeerHello()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers([_Link(self)])
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        """Takes no more links."""
        self._server.stop(None).wait()

    def answer(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """One link: after the first engine all that is to be said, then its end."""
        self.hello = peer_pb2.LinkRequest.FromString(next(requests)).hello
        if self._says and self._says[0] == b"raw":
            yield from self._says[1:]
            return
        hello = peer_pb2.PeerHello(protocol=1, node="f", boot=b"b" * 16, software="fuzz", silence_ms=10_000)
        yield peer_pb2.LinkResponse(hello=hello).SerializeToString()
        for data in requests:
            if self._let_go.is_set():
                self._gone.set()
                return
            for item in peer_pb2.LinkRequest.FromString(data).items:
                if item.HasField("engine"):
                    self.described = item.engine
                    answer = peer_pb2.ReceiverEngineAnswer(
                        incarnation=item.engine.incarnation, sender_engine_id=item.engine.sender_engine_id
                    )
                    fine = peer_pb2.SenderItem(engine_answer=answer)
                    yield peer_pb2.LinkResponse(items=[fine]).SerializeToString()
                if item.HasField("beat"):
                    yield peer_pb2.LinkResponse(
                        items=[peer_pb2.SenderItem(beat=peer_pb2.Beat())]
                    ).SerializeToString()
                if item.HasField("announce") and not self._holds:
                    for said in self._says:
                        yield _about(said, item.announce)
                    return

    def sayings(self) -> st.SearchStrategy[Saying]:
        responses = st.lists(saying(peer_pb2.LinkResponse), max_size=6)
        return st.one_of(responses, responses.map(lambda rest: [b"raw", *rest]))

    def hold(self) -> peer_pb2.ReceiverEngine:
        """Has the daemon describe the engine that receives, unless it has, and takes the reservation back."""
        self._let_go.clear()
        self._gone.clear()
        while (described := self.described) is None:
            key = new_key()
            ghost = Sender("ghost", "127.0.0.1", self._port)
            self._receiver.reserve(key, ghost, range(4), 4 * BLOCK, lease=DEADLINE)
            # It ends at once where the link that was let go is still on its way down.
            eventually(partial(self._described_or_ended, key))
            self._receiver.scheduler.cancel(key, Side.RECEIVER)
            self._receiver.wait_for(ReservationEnded, key)
        return described

    def _described_or_ended(self, key: TransferKey) -> bool:
        ended = (isinstance(event, ReservationEnded) and event.key == key for event in self._receiver.heard)
        return self.described is not None or any(ended)

    def let_go(self) -> None:
        """Ends the link that it holds, if it does."""
        if self.described is None:
            return
        self._let_go.set()
        self._gone.wait(DEADLINE)
        self.described = None

    def say(self, said: Saying) -> None:
        """A reservation that reaches the liar, and ends."""
        self._says = said
        key = new_key()
        ghost = Sender("ghost", "127.0.0.1", self._port)
        self._receiver.reserve(key, ghost, range(4), 4 * BLOCK, lease=DEADLINE)
        if not self._receiver.wait_for(ReservationEnded, key).released:
            self._receiver.wait_for(ReservationReleased, key)


def _about(data: bytes, announced: peer_pb2.Announce) -> bytes:
    """The same message, but that what names a transfer names this one, where it can be read."""
    try:
        response = peer_pb2.LinkResponse.FromString(data)
    except Exception:  # noqa: BLE001, any other bytes go as they are
        return data
    for item in response.items:
        kind = item.WhichOneof("item")
        if kind not in (None, "beat", "engine_answer"):
            body = getattr(item, kind)
            body.key.CopyFrom(announced.key)
            body.incarnation = announced.incarnation
    return response.SerializeToString()


class _Link(grpc.GenericRpcHandler):
    def __init__(self, door: SenderDoor) -> None:
        self._door = door

    def service(self, details: Any) -> Any:
        """Every method is the link."""
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: self._door.answer(requests))


class AdminDoor:
    """admin.sock: each of its methods."""

    name = "admin"

    def __init__(self, node: Node) -> None:
        self._target = f"unix:{node.runtime_dir}/admin.sock"
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        self._methods = [m for m in service.methods if m.name != "Drain"]  # which would end the test

    def sayings(self) -> st.SearchStrategy[Saying]:
        def said(index: int) -> st.SearchStrategy[Saying]:
            method = self._methods[index]
            return saying(GetMessageClass(method.input_type)).map(lambda data: [method.name.encode(), data])

        return st.integers(0, len(self._methods) - 1).flatmap(said)

    def say(self, said: Saying) -> None:
        """The first message names the method."""
        name, data = said
        with grpc.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(f"/kvpush.v1.AdminService/{name.decode()}")
            try:
                call(data, timeout=DEADLINE)
            except grpc.RpcError as error:
                check(error)


def datagram(path: Path, data: bytes, fds: Sequence[int]) -> tuple[bytes, list[int]]:
    """One datagram to fd.sock, and what it answers. Raises TimeoutError where it does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(str(path))
        socket.send_fds(sock, [data], fds)
        if not data and not fds:
            sock.shutdown(socket.SHUT_WR)
        answer, got, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        return answer, got


class FdDoor:
    """fd.sock: datagrams with all sorts of descriptors."""

    name = "fds"

    def __init__(self, node: Node) -> None:
        self._path = node.runtime_dir / "fd.sock"

    def sayings(self) -> st.SearchStrategy[Saying]:
        kinds = st.lists(st.sampled_from([b"pipe", b"memfd", b"socket", b"folder"]), max_size=10)
        data = st.one_of(saying(engine_pb2.PoolOffer), st.binary(max_size=5000))
        return st.builds(lambda offer, fds: [offer, *fds], data, kinds)

    def say(self, said: Saying) -> None:
        """The first message is the datagram, the others say what comes with it."""
        data, *kinds = said
        with contextlib.ExitStack() as stack:
            fds = [_descriptor(kind, stack) for kind in kinds]
            answer, got = datagram(self._path, data, fds)
        for fd in got:
            os.close(fd)
        assert not got, "a lifeline, for nothing"
        if data or fds:
            assert engine_pb2.PoolAnswer.FromString(answer).fault.detail


def _descriptor(kind: bytes, stack: contextlib.ExitStack) -> int:
    match kind:
        case b"pipe":
            fd, other = os.pipe()
            stack.callback(os.close, other)
        case b"memfd":
            fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
        case b"socket":
            fd = socket.socket().detach()
        case _:
            fd = os.open("/", os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd


class BytesDoor:
    """A listener at which bytes are thrown that are no protocol's, or nearly one's."""

    def __init__(
        self, name: str, family: socket.AddressFamily, address: Any, starts: Sequence[bytes]
    ) -> None:
        self.name = name
        self._family = family
        self._address = address
        self._starts = list(starts)

    def sayings(self) -> st.SearchStrategy[Saying]:
        parts = st.one_of(st.sampled_from(self._starts), st.binary(max_size=200))
        return st.lists(parts, min_size=1, max_size=5)

    def say(self, said: Saying) -> None:
        """Ends its side, and waits for the other's end."""
        with socket.socket(self._family) as sock:
            sock.settimeout(DEADLINE)
            sock.connect(self._address)
            with contextlib.suppress(OSError):  # the other end may have had enough before
                for part in said:
                    sock.sendall(part)
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass


HTTP = [
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /readyz HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: " + b"a/b;q=x," * 500 + b"\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET " + b"/" * 9000 + b" HTTP/1.1\r\n",
    b"\r\n" * 50,
]
HTTP2 = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\xff\xff\xff\x01\x05\x00\x00\x00\x01",
    b"\x00\x00\x08\x06\x00\x00\x00\x00\x00pingpong",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def raw_doors(node: Node) -> list[BytesDoor]:
    """Every stream listener of a node."""
    port = int(re.findall(r'"http": ?"[^"]*:(\d+)"', node.log.read_text())[-1])
    unix = [
        BytesDoor(f"raw-{name}", socket.AF_UNIX, str(node.runtime_dir / f"{name}.sock"), HTTP2 + HTTP[:1])
        for name in ("kvpushd", "admin")
    ]
    tcp = BytesDoor("raw-peer", socket.AF_INET, ("127.0.0.1", node.port), HTTP2 + HTTP[:1])
    return [*unix, tcp, BytesDoor("http", socket.AF_INET, ("127.0.0.1", port), HTTP)]
