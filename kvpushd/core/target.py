# SPDX-License-Identifier: Apache-2.0
"""A reservation, as the sending side sees it: where a handoff's bytes go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpush_client.events import Counts, Fault
from kvpushd.core.events import Announced
from kvpushd.core.handoff import Handoff, add
from kvpushd.core.lane import Lane
from kvpushd.core.words import (
    HalfKey,
    Incarnation,
    Instant,
    Phase,
    ReceiverKey,
    ReceiverView,
    TargetKey,
    Times,
    Transfer,
)


@dataclass(slots=True)
class Target:
    """A reservation of another node (or of this one), as the sender sees it."""

    said: Announced
    receiver: ReceiverView
    sender: Incarnation
    """The engine of ours that it wants KV of."""
    lanes: list[Lane]
    handoff: HalfKey | None = None
    times: Times = field(default_factory=Times)
    counts: Counts = field(default_factory=Counts)
    landed_at: list[Instant] = field(default_factory=list)
    stale: int = 0
    """Writes of the sender's former attempts that are not terminal."""
    tainted: bool = False
    """A write into it failed, which only says that nothing reads the source any more: bytes that were under
    way may still land, so this side can't vouch for the fence."""
    orphaned: bool = False
    """Its receiver, or the inlet that it was announced with, is no more: nobody asks about it again."""
    fault: Fault | None = None
    landed: bool = False

    @property
    def key(self) -> TargetKey:
        """What tells it apart from all others."""
        return self.said.link, self.said.incarnation, self.said.key

    @property
    def owner(self) -> ReceiverKey:
        """The receiving engine, and the link on which it speaks."""
        return self.said.link, self.said.incarnation

    @property
    def transfer(self) -> Transfer:
        """What a handoff must be of to fill it."""
        return self.sender, self.said.key.transfer_id

    @property
    def block_count(self) -> int:
        """Blocks that it names, over all groups."""
        return sum(len(b.ids) for b in self.said.blocks)

    @property
    def live(self) -> bool:
        """Neither landed nor ended."""
        return self.fault is None and not self.landed

    @property
    def in_flight(self) -> int:
        """Writes that are not terminal."""
        return self.stale + sum(lane.in_flight for lane in self.lanes)

    @property
    def done(self) -> bool:
        """Everything that the receiver asked for has landed."""
        return not self.stale and all(lane.done for lane in self.lanes)

    @property
    def remaining(self) -> int:
        """Bytes that are not posted yet."""
        return sum(lane.remaining for lane in self.lanes)

    @property
    def whole(self) -> int:
        """Bytes of all that its receiver asked for."""
        return sum(lane.whole for lane in self.lanes)

    @property
    def fenced(self) -> bool:
        """This side can vouch that no write of its can land any more."""
        return not self.in_flight and not self.tainted

    def wrote(self, size: int, runs: int, ended: Instant) -> None:
        """Counts a write that landed."""
        self.landed_at.append(ended)
        self.counts = replace(
            self.counts,
            bytes=self.counts.bytes + size,
            chunks=self.counts.chunks + 1,
            runs=self.counts.runs + runs,
        )
        if not self.times.first_landed:
            self.times = replace(self.times, first_landed=ended)

    def complete(self, sealed_at: Instant, now: Instant) -> None:
        """All of it has landed."""
        self.landed = True
        before = sum(1 for at in self.landed_at if not sealed_at or at < sealed_at)
        self.counts = replace(self.counts, chunks_before_seal=before)
        landed = max(self.landed_at, default=now)
        self.times = replace(self.times, landed=landed, sealed=sealed_at)

    def restart(self) -> None:
        """Forgets what was written, for a new attempt of the sender."""
        self.stale = self.in_flight
        for lane in self.lanes:
            lane.restart()
        self.counts = Counts()
        self.landed_at.clear()
        self.times = replace(self.times, first_post=0, first_landed=0, sealed=0)


def phase_of(handoff: Handoff, targets: list[Target]) -> Phase:
    """Where a handoff stands, derived from its targets."""
    if handoff.fault is not None:
        return Phase.FENCING
    if any(t.times.first_post for t in targets):
        return Phase.MOVING
    return Phase.MATCHED if targets else Phase.OPEN


def counts_of(handoff: Handoff, targets: list[Target]) -> Counts:
    """What a handoff has moved so far: a target's share is the handoff's own only once all of it landed."""
    counts = handoff.counts
    for target in targets:
        if not target.landed:
            counts = add(counts, target.counts)
    return counts


def ranks_of(targets: list[Target]) -> set[int]:
    """The receiving ranks that have announced themselves."""
    return {rank for target in targets for rank in target.receiver.pools}


def everybody(targets: list[Target]) -> bool:
    """Whether all ranks of the receiving engine, over all of its nodes, are there."""
    return bool(targets) and len(ranks_of(targets)) >= targets[0].receiver.world_size
