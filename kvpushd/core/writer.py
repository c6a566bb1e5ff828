# SPDX-License-Identifier: Apache-2.0
"""The writes that are not terminal, and which windows become the next ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from kvpushd.core.engines import Engine, Limits
from kvpushd.core.events import WriteEnded
from kvpushd.core.handoff import Handoff, cut
from kvpushd.core.instructions import Post
from kvpushd.core.lane import Lane
from kvpushd.core.layout import Blocks, Group, Window
from kvpushd.core.pace import Pace
from kvpushd.core.schedule import Candidate, Schedule
from kvpushd.core.target import Target
from kvpushd.core.words import HalfKey, Instant, LinkId, TargetKey, WriteId


@dataclass(frozen=True, slots=True)
class Write:
    """A write under way: whose blocks it reads, and for whom."""

    handoff: HalfKey
    target: Target
    lane: Lane
    size: int
    since: Instant


class Writer:
    """Cuts windows off targets in the order of the schedule, and keeps account of them until they end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._paces: dict[LinkId, Pace] = {}
        self._schedule: Schedule[TargetKey] = Schedule(
            room=lambda link, size: self._pace(link).room(size), rate=self.rate
        )
        self._writes: dict[WriteId, Write] = {}
        self._reading: Counter[HalfKey] = Counter()
        self._last = 0

    def offer(self, target: Target, handoff: Handoff, engine: Engine) -> None:
        """Puts a target in line if it has something to write now; else takes it out."""
        found = self._next(target, handoff, engine)
        if found is None:
            self.withdraw(target)
            return
        lane, window = found
        self._schedule.offer(
            Candidate(
                what=target.key,
                link=target.said.link,
                priority=target.said.priority,
                remaining=target.remaining,
                whole=target.whole,
                since=target.times.matched,
                size=lane.bytes_of(window),
            )
        )

    def more(self, target: Target, handoff: Handoff, engine: Engine) -> None:
        """The same where more than before is final. Who waits for a turn with most of a write stays where it
        is: in its turn it takes all that is final."""
        if not target.live:
            return  # its link may be gone
        waits, write = self._schedule.waits_for(target.key), self._pace(target.said.link).write
        if not 3 * write <= 4 * waits <= 4 * write:
            self.offer(target, handoff, engine)

    def withdraw(self, target: Target) -> None:
        """A target has nothing to write (any more)."""
        self._schedule.withdraw(target.key)

    def turn(self, now: Instant) -> TargetKey | None:
        """Takes the next target out of the line that may write; None if none may."""
        candidate = self._schedule.pop()
        if candidate is None:
            return None
        if candidate.overtakes:
            self._pace(candidate.link).overtaken(now)
        return candidate.what

    def post(self, target: Target, handoff: Handoff, engine: Engine, now: Instant) -> Post | None:
        """The write whose turn it is; None where there is nothing to write."""
        found = self._next(target, handoff, engine)
        if found is None:
            return None
        lane, window = found
        size = lane.bytes_of(window)
        lane.post(window)
        self._last += 1
        write = WriteId(self._last)
        self._writes[write] = Write(handoff.half, target, lane, size, now)
        self._reading[handoff.half] += 1
        self._pace(target.said.link).posted(size, now)
        source = engine.pools[lane.pair.source_rank]
        into = target.receiver.pools[lane.pair.target_rank]
        return Post(
            write=write,
            sender=handoff.incarnation,
            source_rank=lane.pair.source_rank,
            link=target.said.link,
            receiver=target.said.incarnation,
            target_rank=lane.pair.target_rank,
            source_blocks=_touched(handoff.blocks.values(), source.groups, window),
            target_blocks=_touched(target.said.blocks, into.groups, window),
            window=window,
            bytes=size,
        )

    def _pace(self, link: LinkId) -> Pace:
        pace = self._paces.get(link)
        if pace is None:
            pace = self._paces[link] = Pace(self._limits.link_bytes, self._limits.write_bytes)
        return pace

    def rate(self, link: LinkId) -> float:
        """Bytes per second of a link that is busy, as its writes have shown; 0 = not known."""
        pace = self._paces.get(link)
        return pace.rate if pace is not None else 0.0

    def forget(self, link: LinkId) -> None:
        """A link is no more, and nothing waits for it."""
        self._paces.pop(link, None)
        self._schedule.forget(link)

    def _next(self, target: Target, handoff: Handoff, engine: Engine) -> tuple[Lane, Window] | None:
        # NIXL orders nothing: as long as a write of the sender's last attempt is under way, it could land
        # on top of what the next attempt writes to the same position.
        if target.stale or not target.live or not engine.ready:
            return None
        for lane in target.lanes:
            rank = lane.pair.source_rank
            named = handoff.named(lane.pair.groups, engine.pools[rank])
            window = lane.next_window(handoff.frontiers[rank], named, self._pace(target.said.link).write)
            if window is not None:
                return lane, window
        return None

    def ended(self, event: WriteEnded) -> Write | None:
        """Takes a terminal write off the account; None where it is not on it (said twice)."""
        found = self._writes.pop(event.write, None)
        if found is None:
            return None
        pace = self._paces.get(found.target.said.link)
        if pace is not None and event.fault is None and 2 * event.bytes > found.size:
            pace.ended(found.size, event.posted, event.ended)
        elif pace is not None:
            # It failed, or its layers with a window had no blocks: it says nothing of the link's rate.
            pace.failed(found.size)
        self._schedule.ended(found.target.said.link)
        if found.handoff == found.target.handoff:
            found.lane.in_flight -= 1
        else:
            found.target.stale -= 1
        self._reading[found.handoff] -= 1
        if not self._reading[found.handoff]:
            del self._reading[found.handoff]
        return found

    def overdue(self, since: Instant) -> list[Write]:
        """Writes under way that were posted by then, oldest first."""
        return list(takewhile(lambda write: write.since <= since, self._writes.values()))

    def reading(self, handoff: HalfKey) -> int:
        """Writes under way that read the blocks of a handoff."""
        return self._reading[handoff]

    def __len__(self) -> int:
        return len(self._writes)


def _touched(lists: Iterable[Blocks], groups: tuple[Group, ...], window: Window) -> tuple[Blocks, ...]:
    return tuple(cut(b, groups[b.group], window.start, window.end) for b in lists)
