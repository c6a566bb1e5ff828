# SPDX-License-Identifier: Apache-2.0
"""A sender half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvpush_client.events import Counts, Fault, Side, TransferKey
from kvpushd.core.engines import is_local
from kvpushd.core.instructions import Account
from kvpushd.core.lane import Frontier
from kvpushd.core.layout import Blocks, Group, Layout
from kvpushd.core.words import HalfKey, Incarnation, Instant, LinkId, TargetKey, Times, Transfer


@dataclass(slots=True)
class Handoff:
    """A sender half: which blocks of its engine hold which positions, and how far they are final."""

    incarnation: Incarnation
    engine_id: str
    key: TransferKey
    label: str
    receiver_engine_id: str
    lease: Instant
    frontiers: dict[int, Frontier]
    blocks: dict[int, Blocks] = field(default_factory=dict)
    prompts: Mapping[int, bytes] = field(default_factory=dict)
    """The digest of what the positions below an end are of."""
    seal: int | None = None
    advanced_at: Instant = 0
    """When a frontier moved last, by the worker's word."""
    sealed_at: Instant = 0
    """When the last byte became final: with the frontier at the seal, in every rank."""
    deadline: Instant | None = None
    """Runs from the seal for as long as not all of its receiver's ranks are there."""
    targets: list[TargetKey] = field(default_factory=list)
    receivers: set[tuple[str, LinkId]] = field(default_factory=set)
    """Who has matched it, for people."""
    times: Times = field(default_factory=Times)
    counts: Counts = field(default_factory=Counts)
    moved: Counter[LinkId] = field(default_factory=Counter)
    """Bytes that landed, by link."""
    fault: Fault | None = None
    faulted_at: Instant = 0

    @property
    def half(self) -> HalfKey:
        """What tells it apart from all others."""
        return self.incarnation, self.key

    @property
    def transfer(self) -> Transfer:
        """What it is an attempt of."""
        return self.incarnation, self.key.transfer_id

    @property
    def block_count(self) -> int:
        """Blocks that it holds, over all groups."""
        return sum(len(b.ids) for b in self.blocks.values())

    def named(self, groups: Iterable[int], layout: Layout) -> int:
        """One past the last position whose blocks are known in every one of these groups."""
        ends = (reach(self.blocks.get(i), layout.groups[i]) for i in groups)
        return min(ends, default=0)

    @property
    def complete(self) -> bool:
        """All positions up to the seal are final in every rank of this node."""
        return self.seal is not None and all(f.everywhere >= self.seal for f in self.frontiers.values())

    def append(self, lists: Sequence[Blocks], layout: Layout) -> str | None:
        """Adds blocks of groups, all or nothing; naming the same again is harmless. Says what was wrong."""
        blocks = dict(self.blocks)
        for more in lists:
            longer = _joined(blocks.get(more.group), more, layout)
            if isinstance(longer, str):
                return longer
            blocks[more.group] = longer
        self.blocks = blocks
        return None

    def account(self, now: Instant) -> Account:
        """What became of it."""
        return Account(
            side=Side.SENDER,
            incarnation=self.incarnation,
            engine_id=self.engine_id,
            key=self.key,
            other=", ".join(
                name if is_local(link) else f"{name}@{link}" for name, link in sorted(self.receivers)
            ),
            label=self.label,
            start=min((b.start for b in self.blocks.values()), default=0),
            end=self.seal or 0,
            blocks=self.block_count,
            times=replace(self.times, ended=now),
            sender_times=Times(),
            counts=self.counts,
            moved=dict(self.moved),
            fault=self.fault,
            faulted_at=self.faulted_at,
        )


def reach(blocks: Blocks | None, group: Group) -> int:
    """One past the last position whose blocks are known: those before a list's start never will be."""
    return blocks.start + len(blocks.ids) * group.block_size if blocks is not None else 0


def _joined(known: Blocks | None, more: Blocks, layout: Layout) -> Blocks | str:
    if known is None or not len(known.ids):
        return more
    if not len(more.ids):
        return known
    size = layout.groups[more.group].block_size
    at, rest = divmod(more.start - known.start, size)
    if rest or at < 0 or at > len(known.ids):
        end = known.start + len(known.ids) * size
        return f"blocks of group {more.group} start at {more.start}: expected at most {end}, no gap"
    overlap = known.ids[at : at + len(more.ids)]
    if not np.array_equal(overlap, more.ids[: len(overlap)]):
        return f"blocks of group {more.group} from {more.start} on were named otherwise before"
    ids = np.concatenate([known.ids, more.ids[len(overlap) :]])
    if len(ids) > layout.blocks:
        return f"group {more.group} names {len(ids)} blocks, but the pool has {layout.blocks}"
    return Blocks(more.group, known.start, ids)


def cut(blocks: Blocks, group: Group, start: int, end: int) -> Blocks:
    """The blocks of a list that touch positions [start, end)."""
    size = group.block_size
    first = max(0, (start - blocks.start) // size)
    last = max(first, -(-(end - blocks.start) // size))
    return Blocks(blocks.group, blocks.start + first * size, blocks.ids[first:last])


def add(a: Counts, b: Counts) -> Counts:
    """Both together."""
    return Counts(
        a.bytes + b.bytes, a.chunks + b.chunks, a.chunks_before_seal + b.chunks_before_seal, a.runs + b.runs
    )
