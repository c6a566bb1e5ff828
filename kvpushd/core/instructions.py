# SPDX-License-Identifier: Apache-2.0
"""What the ledger wants done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpush_client.events import Counts, Fault, Side, TransferKey
from kvpushd.core.events import (
    Announced,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    Reached,
    ReceiverGone,
    Withdrawn,
)
from kvpushd.core.layout import Blocks, Window
from kvpushd.core.words import Incarnation, Instant, LinkId, Times, WriteId


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
    """Fence: destroy what receives from this link into this engine, if there is anything.

    Answered by exactly one InletClosed, also where a mover's death did it. Until then nothing is reached over
    this link for this engine.
    """

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
    """The other side, for people."""
    label: str
    start: int
    end: int
    blocks: int
    times: Times
    sender_times: Times
    counts: Counts
    moved: Mapping[LinkId, int]
    """Bytes of what landed, by the link that carried it."""
    fault: Fault | None
    faulted_at: Instant
    """When the fault came, which the fence may follow much later; 0 = there is none."""


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
