# SPDX-License-Identifier: Apache-2.0
"""How a session opens: its hello and its welcome, to and from `kvpush.v1` messages (engine.proto)."""

from __future__ import annotations

from kvpush_client import item_wire, wire
from kvpush_client._proto import engine_pb2, types_pb2
from kvpush_client.items import PROTOCOL, DescribePool, Identity, Role, Welcome
from kvpush_client.layout import Layout
from kvpush_client.wire import Malformed

MAX_WORLD = 1 << 16
MAX_PROCESS = 64

_ROLES = {Role.SCHEDULER: engine_pb2.PROCESS_ROLE_SCHEDULER, Role.WORKER: engine_pb2.PROCESS_ROLE_WORKER}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


def hello_to_wire(identity: Identity) -> engine_pb2.Hello:
    """The first message of a session. Raises Malformed, and nothing else, where a value does not fit it."""
    try:
        return _hello_to_wire(identity)
    except Exception as error:  # an engine may give any value, and each fails in its own way
        raise Malformed(f"{identity}: {error!r}") from error


def check(identity: Identity, layout: Layout | None) -> None:
    """Raises Malformed where a process can't say so of itself, and of its pool."""
    hello_to_wire(identity)
    if layout is not None:
        item_wire.item_to_wire(DescribePool(b"", layout))


def _hello_to_wire(identity: Identity) -> engine_pb2.Hello:
    return engine_pb2.Hello(
        protocol=PROTOCOL,
        engine_id=identity.engine_id,
        launch=identity.launch,
        role=_ROLES[identity.role],
        rank=identity.rank,
        world_size=identity.world_size,
        local_ranks=identity.local_ranks,
        fingerprint=types_pb2.Fingerprint(fields=identity.fingerprint),
        software=identity.software,
        process=identity.process,
    )


def identity_from_wire(hello: engine_pb2.Hello) -> Identity:
    """Raises Malformed. The protocol's version and the fingerprint are the caller's to check."""
    if hello.role not in _ROLES_BACK:
        raise Malformed(f"role is {hello.role}, not one of {sorted(_ROLES_BACK)}")
    for name in ("engine_id", "launch"):
        wire.text(name, getattr(hello, name), empty=False)
    wire.text("software", hello.software)
    wire.within("process", len(hello.process), 0, MAX_PROCESS)
    wire.within("world_size", hello.world_size, 1, MAX_WORLD)
    wire.within("local_ranks", hello.local_ranks, 1, hello.world_size)
    wire.within("rank", hello.rank, 0, hello.world_size - 1)
    return Identity(
        engine_id=hello.engine_id,
        launch=hello.launch,
        role=_ROLES_BACK[hello.role],
        rank=hello.rank,
        world_size=hello.world_size,
        local_ranks=hello.local_ranks,
        fingerprint=dict(hello.fingerprint.fields),
        software=hello.software,
        process=hello.process,
    )


def welcome_to_wire(welcome: Welcome, token: bytes, lock: bytes = b"") -> engine_pb2.Welcome:
    """The first answer of a session, with what the daemon itself adds to what it grants."""
    return engine_pb2.Welcome(
        token=token,
        incarnation=welcome.incarnation,
        lease_ms=wire.lease_to_wire(welcome.lease),
        peer_host=welcome.peer_host,
        peer_port=welcome.peer_port,
        software=welcome.software,
        lock=lock,
    )
