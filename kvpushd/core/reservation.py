# SPDX-License-Identifier: Apache-2.0
"""A receiver half, and what its senders' words do to it.

A reservation has one part per sending node. A part goes

    WAITING ──announced──> ANNOUNCED ──> MATCHED ──> MOVING ──> LANDED
       │                        └───────────┴───────────┤
       └── never announced, so nothing to fence         ├── PeerEnded ──> ENDED ──┐
                                                        └── fenced ──> FENCED <───┘ PeerFenced, InletClosed

A reservation *ends* (its request may go on) with its last part landed or with the first fault; it is
*released* (its blocks may be reused) once every part is WAITING, LANDED or FENCED.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from kvpush_client.events import Counts, Fault, Side, TransferKey
from kvpushd.core.attention import Attention
from kvpushd.core.engines import is_local
from kvpushd.core.events import Reserved
from kvpushd.core.instructions import Account
from kvpushd.core.layout import Blocks
from kvpushd.core.words import HalfKey, Incarnation, Instant, LinkId, Phase, SenderAddress, Times


class Part(Enum):
    """Where one sending node's part of a reservation stands."""

    WAITING = "waiting"
    ANNOUNCED = "announced"
    MATCHED = "matched"
    MOVING = "moving"
    LANDED = "landed"
    ENDED = "ended"
    FENCED = "fenced"


class Word(Enum):
    """What may happen to a part."""

    ANNOUNCE = "announce"
    MATCHED = "matched"
    MOVING = "moving"
    LANDED = "landed"
    ENDED = "ended"
    FENCED = "fenced"


LIVE = frozenset({Part.ANNOUNCED, Part.MATCHED, Part.MOVING})
UNFENCED = LIVE | {Part.ENDED}

# The whole of what may happen to a part. What is not here changes nothing: it is late, or said twice.
TRANSITIONS: dict[tuple[Part, Word], Part] = {
    (Part.WAITING, Word.ANNOUNCE): Part.ANNOUNCED,
    (Part.ANNOUNCED, Word.MATCHED): Part.MATCHED,
    (Part.ANNOUNCED, Word.MOVING): Part.MOVING,
    (Part.MATCHED, Word.MOVING): Part.MOVING,
    **{(part, Word.LANDED): Part.LANDED for part in LIVE},
    **{(part, Word.ENDED): Part.ENDED for part in LIVE},
    **{(part, Word.FENCED): Part.FENCED for part in UNFENCED},
}


@dataclass(slots=True)
class Reservation:
    """A receiver half."""

    said: Reserved
    engine_id: str
    deadline: Instant
    """Until when it may stay unmatched."""
    times: Times
    parts: dict[LinkId, Part]
    fault: Fault | None = None
    faulted_at: Instant = 0
    told: bool = False
    """The engine knows that it ended."""
    counts: Counts = field(default_factory=Counts)
    sender_times: Times = field(default_factory=Times)
    moved: dict[LinkId, int] = field(default_factory=dict)
    """Bytes that landed, by link."""

    @property
    def half(self) -> HalfKey:
        """What tells it apart from all others."""
        return self.said.incarnation, self.said.key

    @property
    def incarnation(self) -> Incarnation:
        """Whose it is."""
        return self.said.incarnation

    @property
    def key(self) -> TransferKey:
        """The transfer."""
        return self.said.key

    @property
    def phase(self) -> Phase:
        """Derived from the parts and the fault."""
        if self.told:
            return Phase.FENCING
        if Part.MOVING in self.parts.values():
            return Phase.MOVING
        return Phase.MATCHED if self.matched else Phase.OPEN

    @property
    def matched(self) -> bool:
        """Every sender has said that it has the handoff: the lease does not run."""
        return all(part in (Part.MATCHED, Part.MOVING, Part.LANDED) for part in self.parts.values())

    @property
    def landed(self) -> bool:
        """All bytes are there."""
        return self.fault is None and all(part is Part.LANDED for part in self.parts.values())

    @property
    def fenced(self) -> bool:
        """No write into its blocks can land any more."""
        return not any(part in UNFENCED for part in self.parts.values())

    @property
    def unfenced(self) -> list[LinkId]:
        """The links to other nodes over which something may still come."""
        return [link for link, part in self.parts.items() if part in UNFENCED and not is_local(link)]

    @property
    def attention(self) -> Attention:
        """How soon bytes may come in from other nodes."""
        remote = [part for link, part in self.parts.items() if not is_local(link)]
        if Part.MOVING in remote or (self.told and self.unfenced):
            return Attention.FILLING
        return Attention.EXPECTING if remote else Attention.IDLE

    @property
    def block_count(self) -> int:
        """Blocks that it holds, over all groups."""
        return sum(len(b.ids) for b in self.said.blocks)

    def hear(self, link: LinkId, word: Word) -> bool:
        """Applies a word about the part on a link; False where it is late, doubled, or about no part."""
        part = self.parts.get(link)
        after = TRANSITIONS.get((part, word)) if part else None
        if after is None:
            return False
        self.parts[link] = after
        return True

    def sender_on(self, link: LinkId) -> SenderAddress:
        """Who sends over a link."""
        return next(sender for sender in self.said.senders if sender.link == link)

    def says_the_same(self, again: Reserved) -> bool:
        """Whether a repeated item means this very reservation."""
        mine = self.said
        return (
            (mine.senders, mine.start, mine.end) == (again.senders, again.start, again.end)
            and len(mine.blocks) == len(again.blocks)
            and all(_same(a, b) for a, b in zip(mine.blocks, again.blocks, strict=True))
        )

    def account(self, now: Instant) -> Account:
        """What became of it."""
        said = self.said
        return Account(
            side=Side.RECEIVER,
            incarnation=said.incarnation,
            engine_id=self.engine_id,
            key=said.key,
            other=names_of(said.senders),
            label=said.label,
            start=said.start,
            end=said.end,
            blocks=self.block_count,
            times=replace(self.times, ended=now),
            sender_times=self.sender_times,
            counts=self.counts,
            moved=dict(self.moved),
            fault=self.fault,
            faulted_at=self.faulted_at,
        )


def _same(a: Blocks, b: Blocks) -> bool:
    return (a.group, a.start, a.ids.tolist()) == (b.group, b.start, b.ids.tolist())


def names_of(senders: tuple[SenderAddress, ...]) -> str:
    """The sending side, for people."""
    return ", ".join(s.engine_id if is_local(s.link) else f"{s.engine_id}@{s.link}" for s in senders)
