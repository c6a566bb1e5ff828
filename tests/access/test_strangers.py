# SPDX-License-Identifier: Apache-2.0
"""Who may not come in reaches no RPC, no socket and no page but the public ones."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
import trustme

from kvpush_client import fdsock
from kvpush_client._proto import engine_pb2, peer_pb2
from kvpush_client.errors import DaemonRefused
from kvpush_client.events import Reason
from kvpush_client.items import Identity, Role
from testing.node import DEADLINE, Node
from testing.rank import FINGERPRINT
from tests.access.access_kit import RECEIVER_ITEMS, RPCS, item
from tests.access.conftest import Fleet
from tests.daemon.daemon_kit import eventually
from tests.rpc.engine_kit import Client

pytestmark = pytest.mark.nixl

METHODS = tuple(RPCS)
PATHS = ("/metrics", "/healthz", "/readyz")
LINK = "/kvpush.v1.PeerService/Link"
REASON_KEY = "kvpush-reason"


# The authority, the name that it vouches for (empty = none is shown), and how; or no TLS at all.
Papers = tuple[trustme.CA, str, dict[str, object]] | None


class Caller:
    """Who calls the peer port, and how far they get: the code of everything that is no peer's business."""

    def __init__(
        self, name: str, papers: Callable[[Fleet], tuple[trustme.CA, str, dict[str, object]] | None]
    ):
        self.name = name
        self._papers = papers

    def channel(self, fleet: Fleet) -> grpc.Channel:
        target = f"127.0.0.1:{fleet.v.port}"
        found = self._papers(fleet)
        if found is None:
            return grpc.insecure_channel(target)
        authority, name, how = found
        trusted = fleet.authority.cert_pem.bytes()
        if not name:
            return grpc.secure_channel(target, grpc.ssl_channel_credentials(trusted))
        made = authority.issue_cert(name, **how)  # type: ignore[arg-type]
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        credentials = grpc.ssl_channel_credentials(trusted, made.private_key_pem.bytes(), chain)
        return grpc.secure_channel(target, credentials)

    def __repr__(self) -> str:
        return self.name


YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
OUTSIDE = (
    Caller("no TLS", lambda fleet: None),
    Caller("no certificate", lambda fleet: (fleet.authority, "", {})),
    Caller("wrong authority", lambda fleet: (trustme.CA(), "d.nodes", {})),
    Caller("expired", lambda fleet: (fleet.authority, "d.nodes", {"not_after": YESTERDAY})),
)
OTHER_NODE = Caller("another node's certificate", lambda fleet: (fleet.authority, "e.nodes", {}))
NOT_ALLOWED = Caller("a name that is not allowed", lambda fleet: (fleet.authority, "d.tenants", {}))
PROVEN = (OTHER_NODE, NOT_ALLOWED)


def opening(node: str) -> peer_pb2.LinkRequest:
    hello = peer_pb2.PeerHello(protocol=1, node=node, boot=b"b" * 16, software="test", silence_ms=60_000)
    return peer_pb2.LinkRequest(hello=hello)


def refused(channel: grpc.Channel, method: str, *said: bytes) -> grpc.RpcError:
    """How a call ends that says this."""
    with channel:
        call = channel.stream_stream(method)(iter(said), timeout=DEADLINE)
        with pytest.raises(grpc.RpcError) as raised:
            for _ in call:
                pass
    return raised.value


def held(node: Node) -> dict[str, int]:
    counts = node.status().held
    return {"engines": counts.engines, "reservations": counts.reservations, "handoffs": counts.handoffs}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("who", OUTSIDE, ids=repr)
def test_who_has_no_good_certificate_reaches_no_rpc(fleet: Fleet, who: Caller, method: str) -> None:
    before = held(fleet.v)
    error = refused(who.channel(fleet), method, opening("d.nodes").SerializeToString())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert held(fleet.v) == before


@pytest.mark.parametrize("method", [m for m in METHODS if m != LINK])
@pytest.mark.parametrize("who", PROVEN, ids=repr)
def test_nobody_reaches_engines_or_the_operators_rpcs_by_the_network(
    fleet: Fleet, who: Caller, method: str
) -> None:
    assert refused(who.channel(fleet), method, b"").code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", RECEIVER_ITEMS)
@pytest.mark.parametrize(
    ("who", "node"),
    [(OTHER_NODE, "d.nodes"), (OTHER_NODE, "v.nodes"), (NOT_ALLOWED, "d.tenants"), (NOT_ALLOWED, "d.nodes")],
    ids=str,
)
def test_who_is_not_the_node_that_it_says_is_not_listened_to(
    fleet: Fleet, who: Caller, node: str, kind: str
) -> None:
    key = fleet.open("waiting")
    said = peer_pb2.LinkRequest(items=[item(peer_pb2.ReceiverItem, kind, fleet.stolen(key))])  # type: ignore[list-item]
    error = refused(who.channel(fleet), LINK, opening(node).SerializeToString(), said.SerializeToString())
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert isinstance(error, grpc.Call)
    assert dict(error.trailing_metadata() or ())[REASON_KEY] == "FORBIDDEN"
    fleet.finish(key, "waiting")
    assert '"peer refused"' in fleet.v.log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("door", ["kvpushd.sock", "fd.sock", "admin.sock"])
def test_another_user_of_the_host_opens_no_socket(fleet: Fleet, door: str) -> None:
    try_it = (
        "import os, socket, sys\n"
        "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
        "for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):\n"
        "    try: socket.socket(socket.AF_UNIX, kind).connect(sys.argv[1])\n"
        "    except OSError as error: print(error.errno)\n"
    )

    def tried() -> list[str]:
        command = [sys.executable, "-ISc", try_it, str(fleet.v.runtime_dir / door)]
        nobody = subprocess.run(command, capture_output=True)
        assert nobody.returncode == 0, nobody.stderr
        return nobody.stdout.decode().split()

    eacces = ["13", "13"]
    assert tried() == eacces, "the folder"
    fleet.v.runtime_dir.chmod(0o755)
    try:
        assert tried() == eacces, "the socket"
    finally:
        fleet.v.runtime_dir.chmod(0o750)


def tokens(fleet: Fleet) -> dict[str, bytes]:
    """Tokens that open nothing."""
    client = Client(fleet.v.runtime_dir)
    old = client.welcome(Identity("left", "l", Role.SCHEDULER, fingerprint=FINGERPRINT)).token
    client.close()
    eventually(lambda: not [e for e in fleet.v.engines() if e.engine_id == "left"])
    return {
        "a zero": b"\0",
        "guessed": b"g" * 32,
        "too long": b"g" * 3000,
        "of a session that ended": old,
        "part of one": old[:16],
    }


def test_the_descriptors_socket_wants_the_token_of_a_living_session(fleet: Fleet, wake: int) -> None:
    found = tokens(fleet)
    before = held(fleet.v)
    for token in found.values():
        with pytest.raises(DaemonRefused) as raised:
            fdsock.exchange(fleet.v.runtime_dir / "fd.sock", token, None, timeout=DEADLINE, wake=wake)
        assert raised.value.reason is Reason.FORBIDDEN
    assert held(fleet.v) == before


@pytest.fixture
def wake() -> Iterator[int]:
    """What never wakes anybody."""
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def rejections(node: Node, source: str) -> float:
    return node.metric("kvpush_rejected_messages_total", source=source)


def test_what_is_refused_again_and_again_is_said_once(fleet: Fleet, wake: int) -> None:
    def lines() -> int:
        said = [json.loads(line) for line in fleet.v.log.read_text().splitlines() if line.startswith("{")]
        return sum(line["event"] in ("engine refused", "offer refused", "peer refused") for line in said)

    counted = {source: rejections(fleet.v, source) for source in ("engine", "memory", "peer")}
    for _ in range(40):
        client = Client(fleet.v.runtime_dir)
        client.send(engine_pb2.SessionRequest())
        assert client.refusal()[1] == "INVALID"
        client.close()
        with pytest.raises(DaemonRefused):
            fdsock.exchange(fleet.v.runtime_dir / "fd.sock", b"x", None, timeout=DEADLINE, wake=wake)
        refused(OTHER_NODE.channel(fleet), LINK, opening("d.nodes").SerializeToString())
    # Within 30 s each reason is said once, and this module has several.
    assert lines() < 20
    for source, before in counted.items():
        assert rejections(fleet.v, source) == before + 40


@pytest.mark.parametrize("path", PATHS)
def test_what_http_shows_names_no_transfer(fleet: Fleet, path: str) -> None:
    key = fleet.open("matched")
    code, text = fleet.v.http(path)
    assert code == 200
    for secret in (key.transfer_id.hex(), fleet.stolen(key).incarnation.hex()):
        assert secret not in text
    fleet.finish(key, "matched")


@pytest.mark.parametrize("path", [*PATHS, "/", "/drain", "/metrics/../../etc/passwd"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_http_takes_nothing(fleet: Fleet, method: str, path: str) -> None:
    port = re.findall(r'"http": ?"[^"]*:(\d+)"', fleet.v.log.read_text())[-1]
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", b"x", method=method)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=DEADLINE)
    raised.value.close()
    assert raised.value.code in (404, 405)
