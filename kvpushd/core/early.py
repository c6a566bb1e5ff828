# SPDX-License-Identifier: Apache-2.0
"""What workers said of handoffs that their scheduler has not opened yet: two sessions have no order."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpushd.core.engines import Engine
from kvpushd.core.events import Advanced
from kvpushd.core.lane import Frontier
from kvpushd.core.words import HalfKey, Instant


@dataclass(slots=True)
class Advance:
    """How far ranks are, and when they said so last."""

    since: Instant
    frontiers: dict[int, Frontier]
    at: Instant = 0


class Early:
    """Frontiers without a handoff: kept for a time, and at most so many; the oldest are forgotten first."""

    def __init__(self, keep: Instant, most: int) -> None:
        self._keep = keep
        self._most = most
        self._advances: OrderedDict[HalfKey, Advance] = OrderedDict()

    def note(self, event: Advanced, engine: Engine, now: Instant) -> None:
        """A rank of `engine` is ahead of the handoff."""
        pool = engine.pools.get(event.rank)
        if pool is None:
            return
        key = (event.incarnation, event.key)
        advance = self._advances.setdefault(key, Advance(now, {}))
        frontier = advance.frontiers.setdefault(event.rank, Frontier.at_start(len(pool.layers)))
        frontier.advance(event.positions, event.first_layer, event.end_layer)
        advance.at = max(advance.at, event.at)
        if len(self._advances) > self._most:
            self._advances.popitem(last=False)

    def take(self, key: HalfKey) -> Advance | None:
        """What was said of a handoff that is opened now."""
        return self._advances.pop(key, None)

    def sweep(self, now: Instant) -> None:
        """Forgets what nobody came for. Kept in the order of its first word."""
        while self._advances:
            key, advance = next(iter(self._advances.items()))
            if advance.since + self._keep > now:
                break
            del self._advances[key]

    def __len__(self) -> int:
        return len(self._advances)
