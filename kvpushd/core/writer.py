# SPDX-License-Identifier: Apache-2.0
"""The writes that are not terminal, and which windows become the next ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpushd.core.engines import Engine, Limits
from kvpushd.core.lane import Lane
from kvpushd.core.layout import Blocks, Group, Window
from kvpushd.core.messages import Instant, Post, WriteId
from kvpushd.core.schedule import Candidate, Schedule
from kvpushd.core.target import HalfKey, Handoff, Target, TargetKey, cut


@dataclass(frozen=True, slots=True)
class Write:
    """A write under way: whose blocks it reads, and for whom."""

    handoff: HalfKey
    target: Target
    lane: Lane
    size: int


class Writer:
    """Cuts windows off targets in the order of the schedule, and keeps account of them until they end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._schedule: Schedule[TargetKey] = Schedule(limits.link_bytes)
        self._writes: dict[WriteId, Write] = {}
        self._reading: Counter[HalfKey] = Counter()
        self._last = 0

    def order(self, targets: Iterable[Target], now: Instant) -> Iterator[Target]:
        """The targets that may be written to, the next first."""
        by_key = {t.key: t for t in targets if not self._blocked(t)}
        candidates = (
            Candidate(t.key, t.key[0], t.said.priority, t.remaining, t.times.matched) for t in by_key.values()
        )
        return (by_key[candidate.what] for candidate in self._schedule.order(candidates, now))

    def _blocked(self, target: Target) -> bool:
        # NIXL orders nothing: as long as a write of the sender's last attempt is under way, it could land
        # on top of what the next attempt writes to the same position.
        return target.stale > 0

    def cut(self, target: Target, handoff: Handoff, engine: Engine) -> Iterator[Post]:
        """Posts for what lies between what was posted and the frontier, as much as the link has room for."""
        for lane in target.lanes:
            named = handoff.named(engine.pools[lane.source_rank].groups)
            while (room := self._schedule.room(target.key[0])) > 0:
                most = min(self._limits.write_bytes, room)
                window = lane.next_window(handoff.frontiers[lane.source_rank], named, most)
                if window is None:
                    break
                size = lane.bytes_of(window)
                lane.post(window)
                self._last += 1
                write = WriteId(self._last)
                self._writes[write] = Write((handoff.incarnation, handoff.key), target, lane, size)
                self._reading[handoff.incarnation, handoff.key] += 1
                self._schedule.posted(target.key[0], size)
                yield self._post(write, target, handoff, engine, lane, window, size)

    def _post(
        self,
        write: WriteId,
        target: Target,
        handoff: Handoff,
        engine: Engine,
        lane: Lane,
        window: Window,
        size: int,
    ) -> Post:
        source = engine.pools[lane.source_rank]
        into = target.receiver.pools[lane.target_rank]

        def touched(lists: Iterable[Blocks], groups: tuple[Group, ...]) -> tuple[Blocks, ...]:
            return tuple(cut(b, groups[b.group], window.start, window.end) for b in lists)

        return Post(
            write=write,
            sender=handoff.incarnation,
            source_rank=lane.source_rank,
            link=target.said.link,
            receiver=target.said.incarnation,
            target_rank=lane.target_rank,
            source_blocks=touched(handoff.blocks.values(), source.groups),
            target_blocks=touched(target.said.blocks, into.groups),
            window=window,
            bytes=size,
        )

    def ended(self, write: WriteId) -> Write | None:
        """Takes a terminal write off the account; None where it is not on it (said twice)."""
        found = self._writes.pop(write, None)
        if found is None:
            return None
        self._schedule.ended(found.target.key[0], found.size)
        if found.handoff == found.target.handoff:
            found.lane.in_flight -= 1
        else:
            found.target.stale -= 1
        self._reading[found.handoff] -= 1
        if not self._reading[found.handoff]:
            del self._reading[found.handoff]
        return found

    def reading(self, handoff: HalfKey) -> int:
        """Writes under way that read the blocks of a handoff."""
        return self._reading[handoff]

    def __len__(self) -> int:
        return len(self._writes)
