# SPDX-License-Identifier: Apache-2.0
"""What the ledger hears (events) and what it wants done (instructions).

All are values. Time is an `Instant`: nanoseconds of the node's monotonic clock, which engines and movers of
the node share. Peers are told apart by a `LinkId`; the link to oneself is `LOCAL`, and what is said on it
never leaves the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kvpush_client.events import Counts, Fault, Side, TransferKey
from kvpushd.core.layout import Blocks, Layout, Window

Instant = int
Incarnation = NewType("Incarnation", bytes)
LinkId = NewType("LinkId", str)
WriteId = NewType("WriteId", int)

LOCAL = LinkId("local")
SECOND: Instant = 1_000_000_000


class Phase(Enum):
    """Where a half stands; derived, never stored."""

    OPEN = "open"
    MATCHED = "matched"
    MOVING = "moving"
    FENCING = "fencing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SenderAddress:
    """The engine that is to send, and the link on which its daemon is (or will be) reached."""

    engine_id: str
    link: LinkId


@dataclass(frozen=True, slots=True)
class ReceiverView:
    """A receiving engine as the sending side knows it: what it means and how its pools are cut."""

    engine_id: str
    incarnation: Incarnation
    fingerprint: Mapping[str, str]
    world_size: int
    pools: Mapping[int, Layout]


@dataclass(frozen=True, slots=True)
class Times:
    """Moments of one half; 0 = not yet."""

    opened: Instant = 0
    matched: Instant = 0
    first_post: Instant = 0
    first_landed: Instant = 0
    sealed: Instant = 0
    landed: Instant = 0
    ended: Instant = 0


# --- events: engines -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """An engine has a session; its pools follow."""

    incarnation: Incarnation
    engine_id: str
    fingerprint: Mapping[str, str]
    world_size: int
    local_ranks: int


@dataclass(frozen=True, slots=True)
class PoolMapped:
    """A rank's pool is mapped and registered. The engine is ready with the last of its local ranks."""

    incarnation: Incarnation
    rank: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """A session of the engine ended: nobody is left to use its blocks, but writes may still be under way."""

    incarnation: Incarnation
    detail: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """An engine promises blocks for positions [start, end)."""

    incarnation: Incarnation
    key: TransferKey
    senders: tuple[SenderAddress, ...]
    start: int
    end: int
    blocks: tuple[Blocks, ...]
    lease: Instant | None = None
    priority: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """An engine opens a handoff, appends blocks to it, seals it, or several of these."""

    incarnation: Incarnation
    key: TransferKey
    blocks: tuple[Blocks, ...] = ()
    seal: int | None = None
    lease: Instant | None = None
    receiver_engine_id: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Advanced:
    """Positions below `positions` are final in layers [first_layer, end_layer) of a rank's pool."""

    incarnation: Incarnation
    rank: int
    key: TransferKey
    positions: int
    at: Instant
    first_layer: int = 0
    end_layer: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An engine takes a half back."""

    incarnation: Incarnation
    key: TransferKey
    side: Side
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Declined:
    """An engine wants nothing of a transfer."""

    incarnation: Incarnation
    key: TransferKey
    senders: tuple[SenderAddress, ...]


# --- events: the receiving side of a link ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """The way from a sending engine to a receiving one is open; or, with a fault, it is not."""

    link: LinkId
    incarnation: Incarnation
    sender_engine_id: str
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link on which senders were reached broke."""

    link: LinkId
    detail: str


@dataclass(frozen=True, slots=True)
class InletClosed:
    """Nothing that came from this link into this engine's pools can land any more."""

    link: LinkId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PeerMatched:
    """The sender has the handoff."""

    link: LinkId
    incarnation: Incarnation
    key: TransferKey


@dataclass(frozen=True, slots=True)
class PeerMoving:
    """The sender posts."""

    link: LinkId
    incarnation: Incarnation
    key: TransferKey


@dataclass(frozen=True, slots=True)
class PeerLanded:
    """All of the sender's part is in the reservation's blocks."""

    link: LinkId
    incarnation: Incarnation
    key: TransferKey
    counts: Counts
    times: Times = field(default_factory=Times)


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The sender's part will not land. If not `fenced`, writes may still be under way."""

    link: LinkId
    incarnation: Incarnation
    key: TransferKey
    fault: Fault
    fenced: bool


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """All writes of the sender's part are terminal."""

    link: LinkId
    incarnation: Incarnation
    key: TransferKey


# --- events: the sending side of a link ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Described:
    """A receiving engine can be written to."""

    link: LinkId
    receiver: ReceiverView
    sender_engine_id: str


@dataclass(frozen=True, slots=True)
class ReceiverGone:
    """A described engine, or its inlets, are no more."""

    link: LinkId
    incarnation: Incarnation
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Announced:
    """A reservation on another node wants KV of an engine of this one."""

    link: LinkId
    incarnation: Incarnation
    key: TransferKey
    sender_engine_id: str
    start: int
    end: int
    blocks: tuple[Blocks, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """It no longer does; or, without an incarnation, never will."""

    link: LinkId
    incarnation: Incarnation | None
    key: TransferKey
    sender_engine_id: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class ReceiverLost:
    """The link on which receivers spoke broke."""

    link: LinkId
    detail: str


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """A write is terminal: landed, or failed. Either way it reads and writes nothing any more."""

    write: WriteId
    fault: Fault | None
    bytes: int = 0
    runs: int = 0
    posted: Instant = 0
    ended: Instant = 0


# --- events: the node ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoverDied:
    """The process that holds all inlets and posts all writes of these engines is dead: nothing moves."""

    incarnations: frozenset[Incarnation]


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """No new halves from now on."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    EngineJoined
    | PoolMapped
    | EngineLeft
    | Reserved
    | HandedOff
    | Advanced
    | Cancelled
    | Declined
    | Reached
    | LinkLost
    | InletClosed
    | PeerMatched
    | PeerMoving
    | PeerLanded
    | PeerEnded
    | PeerFenced
    | Described
    | ReceiverGone
    | Announced
    | Withdrawn
    | ReceiverLost
    | WriteEnded
    | MoverDied
    | DrainBegan
    | Tick
)


# --- instructions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellMatched:
    """To the engine: the other half exists."""

    incarnation: Incarnation
    key: TransferKey
    side: Side


@dataclass(frozen=True, slots=True)
class TellReservationEnded:
    """To the engine, exactly once per reservation."""

    incarnation: Incarnation
    key: TransferKey
    fault: Fault | None
    released: bool
    counts: Counts


@dataclass(frozen=True, slots=True)
class TellReservationReleased:
    """To the engine, exactly once per reservation that ended unreleased."""

    incarnation: Incarnation
    key: TransferKey


@dataclass(frozen=True, slots=True)
class TellHandoffEnded:
    """To the engine, exactly once per handoff; nothing reads its blocks any more."""

    incarnation: Incarnation
    key: TransferKey
    fault: Fault | None
    counts: Counts


@dataclass(frozen=True, slots=True)
class TellRejected:
    """To the engine: an item changed nothing."""

    incarnation: Incarnation
    key: TransferKey
    side: Side
    fault: Fault


@dataclass(frozen=True, slots=True)
class Reach:
    """Open the way for a sending engine's bytes into an engine's pools; answered by Reached."""

    link: LinkId
    incarnation: Incarnation
    sender_engine_id: str


@dataclass(frozen=True, slots=True)
class CloseInlet:
    """Fence: destroy what receives from this link into this engine; answered by InletClosed."""

    link: LinkId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class CloseOutlet:
    """Forget the way to a receiving engine, as soon as no write through it is under way."""

    link: LinkId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SayAnnounce:
    """To the sending side."""

    announced: Announced


@dataclass(frozen=True, slots=True)
class SayWithdraw:
    """To the sending side."""

    withdrawn: Withdrawn


@dataclass(frozen=True, slots=True)
class SayReceiverGone:
    """To the sending side."""

    gone: ReceiverGone


@dataclass(frozen=True, slots=True)
class SayReached:
    """To the receiving side: the answer to Described."""

    reached: Reached


@dataclass(frozen=True, slots=True)
class SayPeer:
    """To the receiving side: how its reservation fares."""

    item: PeerMatched | PeerMoving | PeerLanded | PeerEnded | PeerFenced


@dataclass(frozen=True, slots=True)
class Post:
    """Write a window of a handoff into a reservation; answered by exactly one WriteEnded."""

    write: WriteId
    sender: Incarnation
    source_rank: int
    link: LinkId
    receiver: Incarnation
    target_rank: int
    source_blocks: tuple[Blocks, ...]
    target_blocks: tuple[Blocks, ...]
    window: Window
    bytes: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nothing refers to the engine any more: unmap its pools, let it come back."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Account:
    """A half has ended: what became of it, for history, metrics and traces."""

    side: Side
    incarnation: Incarnation
    engine_id: str
    key: TransferKey
    other: str
    label: str
    start: int
    end: int
    blocks: int
    times: Times
    sender_times: Times
    counts: Counts
    fault: Fault | None


Instruction = (
    TellMatched
    | TellReservationEnded
    | TellReservationReleased
    | TellHandoffEnded
    | TellRejected
    | Reach
    | CloseInlet
    | CloseOutlet
    | SayAnnounce
    | SayWithdraw
    | SayReceiverGone
    | SayReached
    | SayPeer
    | Post
    | LetGo
    | Account
)
