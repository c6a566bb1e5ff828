# SPDX-License-Identifier: Apache-2.0
"""What workers said of handoffs that their scheduler has not opened yet: two sessions have no order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvpushd.core.engines import Engine
from kvpushd.core.events import Advanced
from kvpushd.core.lane import Frontier
from kvpushd.core.words import HalfKey, Incarnation, Instant


@dataclass(slots=True)
class Advance:
    """How far ranks are, and when they said so last."""

    since: Instant
    frontiers: dict[int, Frontier]
    at: Instant = 0


class Early:
    """Frontiers without a handoff: kept for a time, and of each engine at most so many."""

    def __init__(self, keep: Instant, most: int) -> None:
        self._keep = keep
        self._most = most
        self._advances: OrderedDict[HalfKey, Advance] = OrderedDict()
        self._count: Counter[Incarnation] = Counter()

    def note(self, event: Advanced, engine: Engine, now: Instant) -> bool:
        """A rank of `engine` is ahead of the handoff. False where too many are: then it is not kept, and
        might have been the last word of that handoff."""
        pool = engine.pools.get(event.rank)
        if pool is None:
            return True
        key = (event.incarnation, event.key)
        advance = self._advances.get(key)
        if advance is None:
            if self._count[event.incarnation] >= self._most:
                return False
            advance = self._advances[key] = Advance(now, {})
            self._count[event.incarnation] += 1
        frontier = advance.frontiers.setdefault(event.rank, Frontier.at_start(len(pool.layers)))
        frontier.advance(event.positions, event.first_layer, event.end_layer)
        advance.at = max(advance.at, event.at)
        return True

    def take(self, key: HalfKey) -> Advance | None:
        """What was said of a handoff that is opened now."""
        advance = self._advances.pop(key, None)
        if advance is not None:
            self._uncount(key[0])
        return advance

    def forget(self, incarnation: Incarnation) -> None:
        """An engine is no more."""
        if incarnation in self._count:
            for key in [key for key in self._advances if key[0] == incarnation]:
                del self._advances[key]
            del self._count[incarnation]

    def sweep(self, now: Instant) -> None:
        """Forgets what nobody came for. Kept in the order of its first word."""
        while self._advances:
            key, advance = next(iter(self._advances.items()))
            if advance.since + self._keep > now:
                break
            del self._advances[key]
            self._uncount(key[0])

    def _uncount(self, incarnation: Incarnation) -> None:
        self._count[incarnation] -= 1
        if not self._count[incarnation]:
            del self._count[incarnation]

    def __len__(self) -> int:
        return len(self._advances)
