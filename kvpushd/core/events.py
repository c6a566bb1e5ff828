# SPDX-License-Identifier: Apache-2.0
"""What the ledger hears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpush_client.events import Counts, Fault, Side, TransferKey
from kvpushd.core.layout import Blocks, Layout
from kvpushd.core.words import Incarnation, Instant, LinkId, ReceiverView, SenderAddress, Times, WriteId

# --- engines -----------------------------------------------------------------------------------------------


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
    prompt: bytes = b""
    """The digest of what the positions below `end` are of; empty = not known."""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """An engine opens a handoff, appends blocks to it, seals it, or several of these.

    By the item that seals, the blocks of all positions of the transfer have been named.
    """

    incarnation: Incarnation
    key: TransferKey
    blocks: tuple[Blocks, ...] = ()
    seal: int | None = None
    lease: Instant | None = None
    receiver_engine_id: str = ""
    label: str = ""
    prompts: Mapping[int, bytes] = field(default_factory=dict)
    """Digests of what the positions below some end are of."""


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


# --- the receiving side of a link --------------------------------------------------------------------------


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
    """Answers CloseInlet: nothing that came from this link into this engine's pools can land any more."""

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


# --- the sending side of a link ----------------------------------------------------------------------------


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
    prompt: bytes = b""


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


# --- the node ----------------------------------------------------------------------------------------------


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
