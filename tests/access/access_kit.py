# SPDX-License-Identifier: Apache-2.0
"""All that can be said to a daemon, from its protos; and what a thief would say who has copied every id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpush_client import wire
from kvpush_client._proto import admin_pb2, engine_pb2, peer_pb2, types_pb2
from kvpush_client.events import TransferKey
from testing.rank import BLOCK, layout

FILES = (engine_pb2, peer_pb2, admin_pb2)
RPCS = sorted(
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
"""Every method of every service."""


def kinds(message: type) -> set[str]:
    """The kinds of item that a message may be."""
    (choice,) = message.DESCRIPTOR.oneofs  # type: ignore[attr-defined]
    return {field.name for field in choice.fields}


@dataclass(frozen=True)
class Stolen:
    """What was copied of a transfer between two engines; no secret of a session, and no certificate."""

    key: TransferKey
    incarnation: bytes
    receiver: str
    sender: str
    pool_id: bytes
    host: str
    port: int

    @property
    def wire(self) -> types_pb2.TransferKey:
        """The key as a message."""
        return wire.key_to_wire(self.key)

    @property
    def blocks(self) -> list[types_pb2.Blocks]:
        """Some blocks."""
        return [types_pb2.Blocks(group=0, start=0, block_ids=range(4))]


AGENT = "e.nodes-626262626262-in-1"
"""An agent of the thief's own node, by its name."""
CUT = wire.layout_to_wire(layout(256))
FAULT = types_pb2.Fault(reason=types_pb2.REASON_CANCELLED, detail="says a thief")
WORKERS = {"describe_pool", "advance"}
"""Items that a worker says; a scheduler says the others."""

ENGINE_ITEMS: dict[str, Callable[[Stolen], object]] = {
    "describe_pool": lambda s: engine_pb2.DescribePool(pool_id=s.pool_id, layout=CUT),
    "reserve": lambda s: engine_pb2.Reserve(
        key=s.wire,
        senders=[engine_pb2.SenderAddress(engine_id=s.sender, host=s.host, port=s.port)],
        end=4 * BLOCK,
        blocks=s.blocks,
    ),
    "handoff": lambda s: engine_pb2.Handoff(key=s.wire, blocks=s.blocks, seal=4 * BLOCK),
    "advance": lambda s: engine_pb2.Advance(key=s.wire, positions=4 * BLOCK),
    "cancel": lambda s: engine_pb2.Cancel(key=s.wire, side=engine_pb2.SIDE_SENDER),
    "decline": lambda s: engine_pb2.Decline(
        key=s.wire, senders=[engine_pb2.SenderAddress(engine_id=s.sender, host=s.host, port=s.port)]
    ),
    "first_token": lambda s: engine_pb2.FirstToken(key=s.wire, unix_ns=1),
}
RECEIVER_ITEMS: dict[str, Callable[[Stolen], object]] = {
    "engine": lambda s: peer_pb2.ReceiverEngine(
        engine_id=s.receiver,
        incarnation=s.incarnation,
        sender_engine_id=s.sender,
        fingerprint=types_pb2.Fingerprint(fields={"model": "test", "protocol": "1"}),
        inlets=[types_pb2.Inlet(transport="nixl-ucx", agent=AGENT, metadata=b"no metadata")],
        pools=[peer_pb2.RankPool(rank=0, inlet=0, base=1 << 20, layout=CUT)],
        world_size=1,
    ),
    "announce": lambda s: peer_pb2.Announce(
        key=s.wire, incarnation=s.incarnation, sender_engine_id=s.sender, end=4 * BLOCK, blocks=s.blocks
    ),
    "withdraw": lambda s: peer_pb2.Withdraw(key=s.wire, sender_engine_id=s.sender, fault=FAULT),
    "beat": lambda s: peer_pb2.Beat(),
    "engine_gone": lambda s: peer_pb2.ReceiverEngineGone(incarnation=s.incarnation),
}
SENDER_ITEMS: dict[str, Callable[[Stolen], object]] = {
    "engine_answer": lambda s: peer_pb2.ReceiverEngineAnswer(
        incarnation=s.incarnation, sender_engine_id=s.sender, fault=FAULT
    ),
    "matched": lambda s: peer_pb2.SenderMatched(key=s.wire, incarnation=s.incarnation),
    "moving": lambda s: peer_pb2.SenderMoving(key=s.wire, incarnation=s.incarnation),
    "landed": lambda s: peer_pb2.SenderLanded(key=s.wire, incarnation=s.incarnation),
    "ended": lambda s: peer_pb2.SenderEnded(key=s.wire, incarnation=s.incarnation, fault=FAULT, fenced=True),
    "fenced": lambda s: peer_pb2.SenderFenced(key=s.wire, incarnation=s.incarnation),
    "beat": lambda s: peer_pb2.Beat(),
}
TABLE = {
    engine_pb2.EngineItem: ENGINE_ITEMS,
    peer_pb2.ReceiverItem: RECEIVER_ITEMS,
    peer_pb2.SenderItem: SENDER_ITEMS,
}


def item(message: type, kind: str, stolen: Stolen) -> object:
    """An item of a kind, about what was stolen."""
    return message(**{kind: TABLE[message][kind](stolen)})
