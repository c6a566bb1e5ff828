# SPDX-License-Identifier: Apache-2.0
"""The peer port of a node that asks for certificates, and what such a node dials."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import trustme
from hypothesis import strategies as st

from kvpush_client._proto import peer_pb2
from kvpush_client.events import Reason, ReservationEnded
from kvpush_client.items import Sender
from testing.node import DEADLINE, Node
from testing.rank import BLOCK, Engine, new_key
from tests.fuzz.doors.door import Saying, check
from tests.fuzz.doors.raw import HTTP, HTTP2, BytesDoor
from tests.fuzz.messages import saying

LINK = "/kvpush.v1.PeerService/Link"
NAMES = "*.nodes"
"""What the caller's certificate covers, so that it may be any node."""


def _client_hello() -> bytes:
    """What a right client says first."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    out = ssl.MemoryBIO()
    talk = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    return out.read()


HELLO = _client_hello()
RECORDS = [
    HELLO,
    HELLO[: len(HELLO) // 2],
    HELLO[:5] + bytes(len(HELLO) - 5),
    b"\x16\x03\x01\xff\xff" + bytes(100),  # a record without an end
    b"\x16\x03\x01\x00\x00" * 50,  # records of nothing
    b"\x15\x03\x03\x00\x02\x02\x28",  # an alert: the handshake failed
    b"\x14\x03\x03\x00\x01\x01",  # what comes only after a handshake
    b"\x17\x03\x03\x00\x20" + bytes(32),  # data before a handshake
    b"\x16\x03\x00\x00\x04\x0e\x00\x00\x00",  # a server's word, of SSL 3
    b"\x80\x2e\x01\x00\x02",  # SSL 2
    *HTTP2,
    HTTP,
]


def _flip(data: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << bit
    return bytes(changed)


def records() -> st.SearchStrategy[Saying]:
    """Bytes that are a handshake, nearly, or not at all."""
    flipped = st.builds(_flip, st.just(HELLO), st.integers(0, len(HELLO)), st.integers(0, 7))
    parts = st.one_of(st.sampled_from(RECORDS), flipped, st.binary(max_size=200))
    return st.lists(parts, min_size=1, max_size=4)


class BeforeDoor(BytesDoor):
    """The port, before any handshake."""

    def __init__(self, node: Node) -> None:
        super().__init__("tls-before", socket.AF_INET, ("127.0.0.1", node.port), RECORDS)

    def sayings(self) -> st.SearchStrategy[Saying]:
        return records()


class Papers:
    """What a caller shows: a certificate of some authority's, or none; and whom it trusts."""

    def __init__(self, trusted: trustme.CA, authority: trustme.CA | None) -> None:
        self._trusted = trusted
        self._made = None if authority is None else authority.issue_cert(NAMES)

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel of gRPC's."""
        roots = self._trusted.cert_pem.bytes()
        if self._made is None:
            return grpc.ssl_channel_credentials(roots)
        chain = b"".join(pem.bytes() for pem in self._made.cert_chain_pems)
        return grpc.ssl_channel_credentials(roots, self._made.private_key_pem.bytes(), chain)

    def context(self, folder: Path) -> ssl.SSLContext:
        """For a socket. The files are written there."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._trusted.configure_trust(context)
        context.set_alpn_protocols(["h2"])
        if self._made is not None:
            file = folder / f"{secrets.token_hex(4)}.pem"
            self._made.private_key_and_cert_chain_pem.write_to_path(str(file))
            context.load_cert_chain(file)
        return context


class CallerDoor:
    """The port, for a caller with some papers; `welcome` says whether it is to be listened to at all."""

    def __init__(self, name: str, node: Node, papers: Papers, *, welcome: bool) -> None:
        self.name = name
        self._target = f"127.0.0.1:{node.port}"
        self._credentials = papers.credentials()
        self._welcome = welcome

    def sayings(self) -> st.SearchStrategy[Saying]:
        how = st.sampled_from([b"hello", b"hello", b"raw"])
        rest = st.lists(saying(peer_pb2.LinkRequest), max_size=6)
        return st.builds(lambda how, rest: [how, *rest], how, rest)

    def say(self, said: Saying) -> None:
        """The first message says whether a right hello comes before the others."""
        how, *rest = said
        node = f"f-{secrets.token_hex(4)}.nodes"
        hello = peer_pb2.PeerHello(protocol=1, node=node, boot=b"b" * 16, software="fuzz", silence_ms=10_000)
        if how == b"hello":
            rest.insert(0, peer_pb2.LinkRequest(hello=hello).SerializeToString())
        options = [("grpc.use_local_subchannel_pool", 1)]
        heard = 0
        with grpc.secure_channel(self._target, self._credentials, options=options) as channel:
            call = channel.stream_stream(LINK)(iter(rest), timeout=DEADLINE)
            try:
                for _ in call:
                    heard += 1
            except grpc.RpcError as error:
                self._ended(error, heard)
            else:
                assert self._welcome, "nobody refused it"
                assert heard or how == b"raw"

    def _ended(self, error: grpc.RpcError, heard: int) -> None:
        if self._welcome:
            check(error)
            return
        # The handshake's end, and no answer of the service, which would name a reason.
        assert heard == 0
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        assert isinstance(error, grpc.Call)
        assert "kvpush-reason" not in dict(error.trailing_metadata() or ())


class InsideDoor:
    """The port, for a caller with right papers whose bytes are not gRPC's."""

    name = "tls-inside"

    def __init__(self, node: Node, papers: Papers, folder: Path) -> None:
        self._address = ("127.0.0.1", node.port)
        self._context = papers.context(folder)

    def sayings(self) -> st.SearchStrategy[Saying]:
        parts = st.one_of(st.sampled_from([*HTTP2, HTTP]), st.binary(max_size=200))
        return st.lists(parts, min_size=1, max_size=5)

    def say(self, said: Saying) -> None:
        """Ends its side, and waits for the other's end."""
        with (
            socket.create_connection(self._address, DEADLINE) as plain,
            self._context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
        ):
            with contextlib.suppress(OSError):  # the other end may have had enough before
                for part in said:
                    sock.sendall(part)
                _end(sock)
            with contextlib.suppress(ConnectionResetError, ssl.SSLError):
                while sock.recv(1 << 16):
                    pass


def _end(sock: ssl.SSLSocket) -> None:
    """Ends this side below TLS: no more comes."""
    socket.socket.shutdown(sock, socket.SHUT_WR)


class DialedDoor:
    """What the daemon dials: a port that answers its handshake with whatever it likes."""

    name = "tls-dialed"

    def __init__(self, receiver: Engine) -> None:
        self._receiver = receiver
        self._says: Sequence[bytes] = ()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Takes no more."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def sayings(self) -> st.SearchStrategy[Saying]:
        return records()

    def say(self, said: Saying) -> None:
        """A reservation that reaches the liar, and ends without its lease."""
        self._says = said
        key = new_key()
        ghost = Sender("ghost", "127.0.0.1", self._port)
        self._receiver.reserve(key, ghost, range(4), 4 * BLOCK, lease=2 * DEADLINE)
        end = self._receiver.wait_for(ReservationEnded, key)
        assert end.fault is not None
        assert end.fault.reason in (Reason.PEER_UNREACHABLE, Reason.FORBIDDEN), end
        assert end.fault.detail
        assert end.released

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(DEADLINE)
                sock.recv(1 << 16)
                for part in self._says:
                    sock.sendall(part)


def tls_doors(node: Node, authority: trustme.CA, folder: Path) -> list[BeforeDoor | CallerDoor | InsideDoor]:
    """The port of a node whose peers `authority` vouches for."""
    return [
        BeforeDoor(node),
        CallerDoor("tls-nobody", node, Papers(authority, None), welcome=False),
        CallerDoor("tls-stranger", node, Papers(authority, trustme.CA()), welcome=False),
        CallerDoor("tls-peer", node, Papers(authority, authority), welcome=True),
        InsideDoor(node, Papers(authority, authority), folder),
    ]
