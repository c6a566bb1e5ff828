# SPDX-License-Identifier: Apache-2.0
"""Which transfer's bytes go next."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvpushd.core.ranked import Ranked
from kvpushd.core.words import SECOND, Instant, LinkId

T = TypeVar("T", bound=Hashable)

PATIENCE = 64
"""A transfer that has waited so many times as long as its bytes take goes before whatever comes now.

The fewer, the longer a short one may wait for a long one that is nearly through: at 11, on a link of
176 MB/s, one of ten 300-token prompts beside two of 8,000 did so for 200 ms, and at 64 for up to 130."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A transfer that has something to write."""

    what: T
    link: LinkId
    priority: int
    remaining: int
    """Bytes of the transfer that are not posted yet."""
    whole: int
    """Bytes of all of it."""
    since: Instant
    """When it was matched."""
    size: int
    """Bytes of the write that it wants to post now."""
    overtakes: bool = False
    """Whether the one that had the last turn on its link wants the next one, too."""


@dataclass(slots=True)
class _Line(Generic[T]):
    """All that waits for one link."""

    rate: int
    """Bytes per second that it carries, as far as their order goes: one for all that wait."""
    last: T | None = None
    """Who had the last turn."""
    waiting: Ranked[T] = field(default_factory=Ranked)


class Schedule(Generic[T]):
    """Shortest first, aged, within a priority; and on a link no more than has `room`.

    How short is the geometric mean of what remains and of the whole: the order in which transfers take the
    fewest times as long as they would alone, on average (Hyytiä, Aalto, Penttinen: Minimizing slowdown in
    heterogeneous size-aware dispatching systems, 2012). By what remains alone, a short one that comes as a
    long one is nearly through would wait for as long again as it takes.

    A transfer that waits gains on younger ones as if bytes of it moved all the while, at the link's `rate` by
    `PATIENCE`: a short prompt overtakes a long one, but only so often, and nothing starves. As all gain
    alike, who is before whom does not change with time.

    The first in line waits for room for its whole write; it is not overtaken because of its size.
    """

    def __init__(self, room: Callable[[LinkId, int], bool], rate: Callable[[LinkId], float]) -> None:
        """Asks whether a link has room for a write of so many bytes, and for its rate in bytes per second."""
        self._room = room
        self._rate = rate
        self._candidates: dict[T, Candidate[T]] = {}
        self._lines: dict[LinkId, _Line[T]] = {}
        self._stirred: dict[LinkId, None] = {}
        """Lines that may have become able to go on since `pop` said no."""

    def offer(self, candidate: Candidate[T]) -> None:
        """A transfer waits for its turn, in place of what it offered before."""
        self._candidates[candidate.what] = candidate
        line = self._line(candidate.link)
        line.waiting.put(candidate.what, _rank(candidate, line.rate))
        self._stirred[candidate.link] = None

    def waits_for(self, what: T) -> int:
        """Bytes of the write that a transfer waits to post; 0 = it does not wait."""
        candidate = self._candidates.get(what)
        return candidate.size if candidate is not None else 0

    def withdraw(self, what: T) -> None:
        """It does not wait any more, if it did."""
        candidate = self._candidates.pop(what, None)
        if candidate is not None:
            self._lines[candidate.link].waiting.drop(what)
            self._stirred[candidate.link] = None

    def pop(self) -> Candidate[T] | None:
        """Takes a transfer out of its line that may post the write it wants; None if none may."""
        while self._stirred:
            link = next(iter(self._stirred))
            line = self._lines.get(link)
            found = line.waiting.first() if line else None
            if line is not None and found is not None:
                candidate = self._candidates[found[0]]
                if self._room(link, candidate.size):
                    line.waiting.drop(found[0])
                    overtakes = line.last is not None and line.last in line.waiting
                    line.last = candidate.what
                    del self._candidates[candidate.what]
                    return replace(candidate, overtakes=True) if overtakes else candidate
            del self._stirred[link]
        return None

    def ended(self, link: LinkId) -> None:
        """A write is terminal: there may be room, and the rate may be another."""
        line = self._lines.get(link)
        if line is None:
            return
        rate = int(self._rate(link))
        if not line.rate <= 2 * rate <= 4 * line.rate:
            # Seldom, hence all of them: ranks of different rates can't be compared.
            line.rate = rate
            for what in line.waiting:
                line.waiting.put(what, _rank(self._candidates[what], rate))
        self._stirred[link] = None

    def forget(self, link: LinkId) -> None:
        """A link is no more, and nothing waits for it."""
        self._lines.pop(link, None)

    def _line(self, link: LinkId) -> _Line[T]:
        line = self._lines.get(link)
        if line is None:
            line = self._lines[link] = _Line(int(self._rate(link)))
        return line

    def __len__(self) -> int:
        return len(self._candidates)


def _rank(candidate: Candidate[T], rate: int) -> tuple[int, int]:
    length = math.isqrt(candidate.remaining * candidate.whole)
    return -candidate.priority, length * SECOND * PATIENCE + candidate.since * rate
