# SPDX-License-Identifier: Apache-2.0
"""What a session tells its engine.

Plain values: nothing here needs gRPC, so that a connector and its tests can be read without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Side(Enum):
    """Which half of a transfer."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Reason(IntEnum):
    """Why something was refused or did not end well; the numbers of `kvpush.v1.Reason`."""

    UNSPECIFIED = 0
    CANCELLED = 1
    PEER_CANCELLED = 2
    EXPIRED = 3
    PEER_UNREACHABLE = 4
    NO_SUCH_ENGINE = 5
    ENGINE_GONE = 6
    STALE_INCARNATION = 7
    LAYOUT_MISMATCH = 8
    FINGERPRINT_MISMATCH = 9
    DUPLICATE = 10
    STALE_ATTEMPT = 11
    POSITIONS_MISSING = 12
    TRANSPORT_FAILED = 13
    MOVER_DIED = 14
    OVER_LIMIT = 15
    DRAINING = 16
    INVALID = 17
    FORBIDDEN = 18
    NOT_WANTED = 19
    FENCED = 20
    UNSUPPORTED = 21
    BAD_MEMORY = 22
    CORRUPTED = 23
    PROMPT_MISMATCH = 24


@dataclass(frozen=True, slots=True)
class Fault:
    """A refusal, or an end that is not a success."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.name.lower()}: {self.detail}" if self.detail else self.reason.name.lower()


@dataclass(frozen=True, slots=True)
class TransferKey:
    """One attempt of one dispatch of one request; `transfer_id` is 16 unguessable bytes."""

    transfer_id: bytes
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.transfer_id.hex()}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Counts:
    """What one transfer moved."""

    bytes: int = 0
    chunks: int = 0
    chunks_before_seal: int = 0
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Connected:
    """The session is up (again); the engine has a new incarnation."""

    incarnation: bytes
    peer_host: str
    peer_port: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The daemon is away. Every open half has been ended by events of its own."""

    detail: str


@dataclass(frozen=True, slots=True)
class Matched:
    """The other half of a transfer exists."""

    key: TransferKey
    side: Side


@dataclass(frozen=True, slots=True)
class ReservationEnded:
    """The wait is over, exactly once per reservation. Without a fault all KV has landed.

    If not `released`, a ReservationReleased follows, and until then the blocks may still be written.
    """

    key: TransferKey
    fault: Fault | None
    released: bool
    counts: Counts = Counts()


@dataclass(frozen=True, slots=True)
class ReservationReleased:
    """No write into the blocks of a reservation that ended unreleased can land any more."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """A handoff is over, exactly once; nothing reads its blocks any more."""

    key: TransferKey
    fault: Fault | None
    counts: Counts = Counts()


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item was not accepted, and nothing changed by it (a duplicate key, say)."""

    key: TransferKey
    side: Side
    fault: Fault


@dataclass(frozen=True, slots=True)
class Draining:
    """The daemon takes no new work."""


Event = (
    Connected
    | Disconnected
    | Matched
    | ReservationEnded
    | ReservationReleased
    | HandoffEnded
    | Rejected
    | Draining
)
