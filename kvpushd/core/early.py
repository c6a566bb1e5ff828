# SPDX-License-Identifier: Apache-2.0
"""What workers said of handoffs that their scheduler has not opened yet: two sessions have no order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from kvpush_client.events import TransferKey
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
        self._of: dict[Incarnation, dict[TransferKey, Advance]] = {}
        """By engine, in the order of the first word."""

    def note(self, event: Advanced, engine: Engine, now: Instant) -> bool:
        """A rank of `engine` is ahead of the handoff. False where too many are: then it is not kept, and
        might have been the last word of that handoff."""
        pool = engine.pools.get(event.rank)
        if pool is None:
            return True
        mine = self._of.setdefault(event.incarnation, {})
        if event.key not in mine and len(mine) >= self._most:
            return False
        advance = mine.setdefault(event.key, Advance(now, {}))
        frontier = advance.frontiers.setdefault(event.rank, Frontier.at_start(len(pool.layers)))
        frontier.advance(event.positions, event.first_layer, event.end_layer)
        advance.at = max(advance.at, event.at)
        return True

    def take(self, half: HalfKey) -> Advance | None:
        """What was said of a handoff that is opened now."""
        incarnation, key = half
        return self._of.get(incarnation, {}).pop(key, None)

    def forget(self, incarnation: Incarnation) -> None:
        """An engine is no more."""
        self._of.pop(incarnation, None)

    def sweep(self, now: Instant) -> None:
        """Forgets what nobody came for."""
        for incarnation, mine in list(self._of.items()):
            old = takewhile(lambda kept: kept[1].since + self._keep <= now, mine.items())
            for key, _ in list(old):
                del mine[key]
            if not mine:
                del self._of[incarnation]

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._of.values())
