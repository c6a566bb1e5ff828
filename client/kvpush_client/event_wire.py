# SPDX-License-Identifier: Apache-2.0
"""What a daemon says in a session to and from `kvpush.v1` messages (engine.proto)."""

from __future__ import annotations

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
)
from kvpush_client.wire import Malformed


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
                matched=pb.Matched(key=wire.key_to_wire(event.key), side=wire.side_to_wire(event.side))
            )
        case Rejected():
            return pb.EngineEvent(
                rejected=pb.Rejected(
                    key=wire.key_to_wire(event.key),
                    side=wire.side_to_wire(event.side),
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
            return Matched(wire.key_from_wire(message.matched.key), wire.side_from_wire(message.matched.side))
        case "rejected":
            rejected = message.rejected
            fault = wire.fault_from_wire(rejected.fault)
            try:
                side = wire.side_from_wire(rejected.side)
            except Malformed:
                return Refusal(fault)
            if not rejected.HasField("key"):
                return Refusal(fault)
            return Rejected(wire.key_from_wire(rejected.key), side, fault)
        case "pool_ready":
            return PoolReady(message.pool_ready.pool_id)
        case "draining":
            return Draining()
        case _:
            return None


def _fault(fault: Fault | None) -> types_pb2.Fault | None:
    return wire.fault_to_wire(fault) if fault is not None else None
