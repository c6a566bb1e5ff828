# SPDX-License-Identifier: Apache-2.0
"""Items and events of a session to and from `kvpush.v1` messages (engine.proto)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpush_client import wire
from kvpush_client._proto import engine_pb2, types_pb2
from kvpush_client.events import (
    Draining,
    Fault,
    HandoffEnded,
    Matched,
    Rejected,
    ReservationEnded,
    ReservationReleased,
    Side,
    TransferKey,
)
from kvpush_client.items import (
    PROTOCOL,
    Advance,
    Cancel,
    Decline,
    DescribePool,
    FirstToken,
    Handoff,
    Identity,
    Item,
    Reserve,
    Role,
    Sender,
    Welcome,
)
from kvpush_client.layout import Blocks
from kvpush_client.wire import Malformed

MAX_TEXT = 512
"""Characters of an id, a host or a label."""
MAX_SENDERS = 256
MAX_POSITION = (1 << 31) - 1
MAX_BLOCK_IDS = 1 << 20
"""Block ids in one item, over all groups."""
MAX_WORLD = 1 << 16

_SIDES = {Side.SENDER: engine_pb2.SIDE_SENDER, Side.RECEIVER: engine_pb2.SIDE_RECEIVER}
_SIDES_BACK = {number: side for side, number in _SIDES.items()}
_ROLES = {Role.SCHEDULER: engine_pb2.PROCESS_ROLE_SCHEDULER, Role.WORKER: engine_pb2.PROCESS_ROLE_WORKER}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


@dataclass(frozen=True, slots=True)
class PoolReady:
    """Answers DescribePool: the pool is mapped and registered."""

    pool_id: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A Rejected that names no half: of a pool, or of an item from which nothing hangs."""

    fault: Fault


DaemonEvent = (
    PoolReady
    | Matched
    | ReservationEnded
    | ReservationReleased
    | HandoffEnded
    | Rejected
    | Refusal
    | Draining
)
"""What a daemon says once a session is open."""


# --- opening ----------------------------------------------------------------------------------------------


def hello_to_wire(identity: Identity) -> engine_pb2.Hello:
    """The first message of a session."""
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
    )


def identity_from_wire(hello: engine_pb2.Hello) -> Identity:
    """Raises Malformed. The protocol's version and the fingerprint are the caller's to check."""
    if hello.role not in _ROLES_BACK:
        raise Malformed(f"role is {hello.role}, not one of {sorted(_ROLES_BACK)}")
    for name in ("engine_id", "launch"):
        _text(name, getattr(hello, name), empty=False)
    _text("software", hello.software)
    _within("world_size", hello.world_size, 1, MAX_WORLD)
    _within("local_ranks", hello.local_ranks, 1, hello.world_size)
    _within("rank", hello.rank, 0, hello.world_size - 1)
    return Identity(
        engine_id=hello.engine_id,
        launch=hello.launch,
        role=_ROLES_BACK[hello.role],
        rank=hello.rank,
        world_size=hello.world_size,
        local_ranks=hello.local_ranks,
        fingerprint=dict(hello.fingerprint.fields),
        software=hello.software,
    )


def welcome_to_wire(welcome: Welcome, token: bytes) -> engine_pb2.Welcome:
    """The first answer of a session."""
    return engine_pb2.Welcome(
        token=token,
        incarnation=welcome.incarnation,
        lease_ms=_lease_ms(welcome.lease),
        peer_host=welcome.peer_host,
        peer_port=welcome.peer_port,
        software=welcome.software,
    )


def welcome_from_wire(message: engine_pb2.Welcome) -> Welcome:
    """What the daemon grants; the token stays in the message."""
    return Welcome(
        incarnation=message.incarnation,
        lease=message.lease_ms / 1000,
        peer_host=message.peer_host,
        peer_port=message.peer_port,
        software=message.software,
    )


# --- items ------------------------------------------------------------------------------------------------


def item_to_wire(item: Item) -> engine_pb2.EngineItem:
    """Raises Malformed where a value does not fit its field."""
    try:
        return _item_to_wire(item)
    except (TypeError, ValueError) as error:
        raise Malformed(f"{type(item).__name__}: {error}") from error


def _item_to_wire(item: Item) -> engine_pb2.EngineItem:
    pb = engine_pb2
    match item:
        case Advance():
            return pb.EngineItem(
                advance=pb.Advance(
                    key=wire.key_to_wire(item.key),
                    first_layer=item.first_layer,
                    end_layer=item.end_layer or 0,
                    positions=item.positions,
                    final_monotonic_ns=item.at,
                )
            )
        case Handoff():
            return pb.EngineItem(
                handoff=pb.Handoff(
                    key=wire.key_to_wire(item.key),
                    blocks=_blocks_to_wire(item.blocks),
                    seal=item.seal or 0,
                    lease_ms=_lease_ms(item.lease),
                    receiver_engine_id=item.receiver_engine_id,
                    label=item.label,
                )
            )
        case Reserve():
            return pb.EngineItem(
                reserve=pb.Reserve(
                    key=wire.key_to_wire(item.key),
                    senders=_senders_to_wire(item.senders),
                    start=item.start,
                    end=item.end,
                    blocks=_blocks_to_wire(item.blocks),
                    lease_ms=_lease_ms(item.lease),
                    priority=item.priority,
                    label=item.label,
                )
            )
        case Cancel():
            return pb.EngineItem(
                cancel=pb.Cancel(key=wire.key_to_wire(item.key), side=_SIDES[item.side], detail=item.detail)
            )
        case Decline():
            return pb.EngineItem(
                decline=pb.Decline(key=wire.key_to_wire(item.key), senders=_senders_to_wire(item.senders))
            )
        case FirstToken():
            return pb.EngineItem(
                first_token=pb.FirstToken(key=wire.key_to_wire(item.key), unix_ns=item.unix_ns)
            )
        case DescribePool():
            return pb.EngineItem(
                describe_pool=pb.DescribePool(pool_id=item.pool_id, layout=wire.layout_to_wire(item.layout))
            )


def item_from_wire(message: engine_pb2.EngineItem) -> Item:
    """Raises Malformed, naming the field, what it was and what was expected."""
    match message.WhichOneof("item"):
        case "advance":
            advance = message.advance
            return Advance(
                key=wire.key_from_wire(advance.key),
                positions=_position("positions", advance.positions),
                first_layer=advance.first_layer,
                end_layer=advance.end_layer or None,
                at=advance.final_monotonic_ns,
            )
        case "handoff":
            handoff = message.handoff
            return Handoff(
                key=wire.key_from_wire(handoff.key),
                blocks=_blocks_from_wire(handoff.blocks),
                seal=_position("seal", handoff.seal) or None,
                lease=_lease(handoff.lease_ms),
                receiver_engine_id=_text("receiver_engine_id", handoff.receiver_engine_id),
                label=_text("label", handoff.label),
            )
        case "reserve":
            reserve = message.reserve
            if not reserve.start < _position("end", reserve.end):
                raise Malformed(f"positions [{reserve.start}, {reserve.end}) are empty")
            return Reserve(
                key=wire.key_from_wire(reserve.key),
                senders=_senders_from_wire(reserve.senders),
                start=reserve.start,
                end=reserve.end,
                blocks=_blocks_from_wire(reserve.blocks),
                lease=_lease(reserve.lease_ms),
                priority=reserve.priority,
                label=_text("label", reserve.label),
            )
        case "cancel":
            cancel = message.cancel
            return Cancel(
                wire.key_from_wire(cancel.key), side_from_wire(cancel.side), cancel.detail[:MAX_TEXT]
            )
        case "decline":
            decline = message.decline
            return Decline(wire.key_from_wire(decline.key), _senders_from_wire(decline.senders))
        case "first_token":
            return FirstToken(wire.key_from_wire(message.first_token.key), message.first_token.unix_ns)
        case "describe_pool":
            describe = message.describe_pool
            return DescribePool(describe.pool_id, wire.layout_from_wire(describe.layout))
        case _:
            raise Malformed("the item is empty, or of a kind that this version does not know")


def half_of(item: Item) -> tuple[TransferKey, Side] | None:
    """The half that an item opens or appends to; None for all other items."""
    match item:
        case Reserve():
            return item.key, Side.RECEIVER
        case Handoff():
            return item.key, Side.SENDER
        case _:
            return None


def half_of_message(message: engine_pb2.EngineItem) -> tuple[TransferKey, Side] | None:
    """The same, of an item that may be malformed; None also where its key can't be read."""
    try:
        match message.WhichOneof("item"):
            case "reserve":
                return wire.key_from_wire(message.reserve.key), Side.RECEIVER
            case "handoff":
                return wire.key_from_wire(message.handoff.key), Side.SENDER
            case _:
                return None
    except Malformed:
        return None


def side_from_wire(side: engine_pb2.Side.ValueType) -> Side:
    """Raises Malformed where the side is not said, or unknown."""
    try:
        return _SIDES_BACK[side]
    except KeyError:
        raise Malformed(f"side is {side}, not one of {sorted(_SIDES_BACK)}") from None


def _blocks_to_wire(blocks: Sequence[Blocks]) -> list[types_pb2.Blocks]:
    _within("number of block ids", sum(len(b.ids) for b in blocks), 0, MAX_BLOCK_IDS)
    return [wire.blocks_to_wire(b) for b in blocks]


def _blocks_from_wire(messages: Sequence[types_pb2.Blocks]) -> tuple[Blocks, ...]:
    _within("number of block ids", sum(len(b.block_ids) for b in messages), 0, MAX_BLOCK_IDS)
    return tuple(wire.blocks_from_wire(b) for b in messages)


def _senders_to_wire(senders: Iterable[Sender]) -> list[engine_pb2.SenderAddress]:
    return [engine_pb2.SenderAddress(engine_id=s.engine_id, host=s.host, port=s.port) for s in senders]


def _senders_from_wire(senders: Iterable[engine_pb2.SenderAddress]) -> tuple[Sender, ...]:
    found = tuple(
        Sender(
            _text("senders.engine_id", s.engine_id, empty=False),
            _text("senders.host", s.host, empty=False),
            _within("senders.port", s.port, 1, 65535),
        )
        for s in senders
    )
    _within("number of senders", len(found), 1, MAX_SENDERS)
    return found


def _lease_ms(lease: float | None) -> int:
    # 0 would mean the daemon's lease.
    return 0 if lease is None else max(1, round(lease * 1000))


def _lease(lease_ms: int) -> float | None:
    return lease_ms / 1000 if lease_ms else None


def _position(name: str, value: int) -> int:
    return _within(name, value, 0, MAX_POSITION)


def _within(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise Malformed(f"{name} is {value}, not from {low} to {high}")
    return value


def _text(name: str, value: str, *, empty: bool = True) -> str:
    if len(value) > MAX_TEXT:
        raise Malformed(f"{name} has {len(value)} characters; at most {MAX_TEXT} are allowed")
    if not value and not empty:
        raise Malformed(f"{name} is empty")
    return value


# --- events -----------------------------------------------------------------------------------------------


def event_to_wire(event: DaemonEvent) -> engine_pb2.EngineEvent:
    """An event as a message."""
    pb = engine_pb2
    match event:
        case ReservationEnded():
            return pb.EngineEvent(
                reservation_ended=pb.ReservationEnded(
                    key=wire.key_to_wire(event.key),
                    fault=_fault(event.fault),
                    released=event.released,
                    counts=wire.counts_to_wire(event.counts),
                )
            )
        case HandoffEnded():
            return pb.EngineEvent(
                handoff_ended=pb.HandoffEnded(
                    key=wire.key_to_wire(event.key),
                    fault=_fault(event.fault),
                    counts=wire.counts_to_wire(event.counts),
                )
            )
        case ReservationReleased():
            return pb.EngineEvent(
                reservation_released=pb.ReservationReleased(key=wire.key_to_wire(event.key))
            )
        case Matched():
            return pb.EngineEvent(
                matched=pb.Matched(key=wire.key_to_wire(event.key), side=_SIDES[event.side])
            )
        case Rejected():
            return pb.EngineEvent(
                rejected=pb.Rejected(
                    key=wire.key_to_wire(event.key),
                    side=_SIDES[event.side],
                    fault=wire.fault_to_wire(event.fault),
                )
            )
        case Refusal():
            return pb.EngineEvent(rejected=pb.Rejected(fault=wire.fault_to_wire(event.fault)))
        case PoolReady():
            return pb.EngineEvent(pool_ready=pb.PoolReady(pool_id=event.pool_id))
        case Draining():
            return pb.EngineEvent(draining=pb.Draining())


def event_from_wire(message: engine_pb2.EngineEvent) -> DaemonEvent | None:
    """An event; None where it is of a kind that this version does not know. Raises Malformed."""
    match message.WhichOneof("event"):
        case "reservation_ended":
            ended = message.reservation_ended
            return ReservationEnded(
                key=wire.key_from_wire(ended.key),
                fault=wire.fault_from_wire(ended.fault) if ended.HasField("fault") else None,
                released=ended.released,
                counts=wire.counts_from_wire(ended.counts),
            )
        case "handoff_ended":
            over = message.handoff_ended
            return HandoffEnded(
                key=wire.key_from_wire(over.key),
                fault=wire.fault_from_wire(over.fault) if over.HasField("fault") else None,
                counts=wire.counts_from_wire(over.counts),
            )
        case "reservation_released":
            return ReservationReleased(wire.key_from_wire(message.reservation_released.key))
        case "matched":
            return Matched(wire.key_from_wire(message.matched.key), side_from_wire(message.matched.side))
        case "rejected":
            rejected = message.rejected
            fault = wire.fault_from_wire(rejected.fault)
            if not rejected.HasField("key") or rejected.side not in _SIDES_BACK:
                return Refusal(fault)
            return Rejected(wire.key_from_wire(rejected.key), side_from_wire(rejected.side), fault)
        case "pool_ready":
            return PoolReady(message.pool_ready.pool_id)
        case "draining":
            return Draining()
        case _:
            return None


def _fault(fault: Fault | None) -> types_pb2.Fault | None:
    return wire.fault_to_wire(fault) if fault is not None else None
