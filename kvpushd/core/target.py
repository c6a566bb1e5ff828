# SPDX-License-Identifier: Apache-2.0
"""The sending side's two records: its own handoff, and the reservation that it fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvpush_client.events import Counts, Fault, TransferKey
from kvpushd.core.lane import Frontier, Lane
from kvpushd.core.layout import Blocks, Group, GroupKind
from kvpushd.core.messages import Announced, Incarnation, Instant, LinkId, Phase, ReceiverView, Times

TargetKey = tuple[LinkId, Incarnation, TransferKey]
HalfKey = tuple[Incarnation, TransferKey]


@dataclass(slots=True)
class Target:
    """A reservation of another node (or of this one), as the sender sees it."""

    said: Announced
    receiver: ReceiverView
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
    fault: Fault | None = None
    landed: bool = False

    @property
    def key(self) -> TargetKey:
        """What tells it apart from all others."""
        return self.said.link, self.said.incarnation, self.said.key

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

    def restart(self) -> None:
        """Forgets what was written, for a new attempt of the sender."""
        self.stale = self.in_flight
        for lane in self.lanes:
            lane.restart()
        self.counts = Counts()
        self.landed_at.clear()
        self.times = replace(self.times, first_post=0, first_landed=0, sealed=0)


@dataclass(slots=True)
class Handoff:
    """A sender half."""

    incarnation: Incarnation
    engine_id: str
    key: TransferKey
    label: str
    receiver_engine_id: str
    lease: Instant
    frontiers: dict[int, Frontier]
    blocks: dict[int, Blocks] = field(default_factory=dict)
    seal: int | None = None
    sealed_at: Instant = 0
    """When the last byte became final: with the frontier at the seal, in every rank."""
    deadline: Instant | None = None
    """Runs from the seal for as long as no target is there."""
    targets: set[TargetKey] = field(default_factory=set)
    times: Times = field(default_factory=Times)
    counts: Counts = field(default_factory=Counts)
    fault: Fault | None = None

    @property
    def block_count(self) -> int:
        """Blocks that it holds, over all groups."""
        return sum(len(b.ids) for b in self.blocks.values())

    def named(self, groups: Sequence[Group]) -> int:
        """One past the last position whose blocks are known in every group that holds all positions."""
        full = [i for i, group in enumerate(groups) if group.kind is GroupKind.FULL]
        ends = [b.start + len(b.ids) * groups[i].block_size for i in full if (b := self.blocks.get(i))]
        return min(ends) if len(ends) == len(full) and ends else 0

    @property
    def complete(self) -> bool:
        """All positions up to the seal are final in every rank of this node."""
        return self.seal is not None and all(f.everywhere >= self.seal for f in self.frontiers.values())

    def append(self, blocks: Blocks, group: Group) -> str | None:
        """Adds blocks of one group; naming the same again is harmless. Says what was wrong, if anything."""
        known = self.blocks.get(blocks.group)
        if known is None or not len(known.ids):
            self.blocks[blocks.group] = blocks
            return None
        at, rest = divmod(blocks.start - known.start, group.block_size)
        if rest or at < 0 or at > len(known.ids):
            end = known.start + len(known.ids) * group.block_size
            return f"blocks of group {blocks.group} start at {blocks.start}: expected at most {end}, no gap"
        overlap = known.ids[at : at + len(blocks.ids)]
        if not np.array_equal(overlap, blocks.ids[: len(overlap)]):
            return f"blocks of group {blocks.group} from {blocks.start} on were named otherwise before"
        ids = np.concatenate([known.ids, blocks.ids[len(overlap) :]])
        self.blocks[blocks.group] = Blocks(blocks.group, known.start, ids)
        return None


def cut(blocks: Blocks, group: Group, start: int, end: int) -> Blocks:
    """The blocks of a list that touch positions [start, end)."""
    size = group.block_size
    first = max(0, (start - blocks.start) // size)
    last = max(first, -(-(end - blocks.start) // size))
    return Blocks(blocks.group, blocks.start + first * size, blocks.ids[first:last])


def phase_of(handoff: Handoff, targets: list[Target]) -> Phase:
    """Where a handoff stands, derived from its targets."""
    if handoff.fault is not None:
        return Phase.FENCING
    if any(t.times.first_post for t in targets):
        return Phase.MOVING
    return Phase.MATCHED if targets else Phase.OPEN


def add(a: Counts, b: Counts) -> Counts:
    """Both together."""
    return Counts(
        a.bytes + b.bytes, a.chunks + b.chunks, a.chunks_before_seal + b.chunks_before_seal, a.runs + b.runs
    )
