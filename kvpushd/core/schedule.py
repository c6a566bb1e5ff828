# SPDX-License-Identifier: Apache-2.0
"""Which transfer's bytes go next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvpushd.core.messages import SECOND, Instant, LinkId

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A transfer that has something to write."""

    what: T
    link: LinkId
    priority: int
    remaining: int
    """Bytes of the whole transfer that are not posted yet."""
    since: Instant
    """When it was matched."""


class Schedule(Generic[T]):
    """Shortest remaining first, aged, within a priority; and at most so many bytes in flight to a link.

    A transfer that waits gains on younger ones as if `aging` bytes of it had moved each second: a short
    prompt overtakes a long one, but only so often, and nothing starves.
    """

    def __init__(self, link_bytes: int, aging: int = 256 << 20) -> None:
        self._link_bytes = link_bytes
        self._aging = aging
        self._in_flight: defaultdict[LinkId, int] = defaultdict(int)

    def order(self, candidates: Iterable[Candidate[T]], now: Instant) -> Iterator[Candidate[T]]:
        """The candidates, the next first."""

        def rank(candidate: Candidate[T]) -> tuple[int, float]:
            waited = (now - candidate.since) / SECOND
            return -candidate.priority, candidate.remaining - waited * self._aging

        return iter(sorted(candidates, key=rank))

    def room(self, link: LinkId) -> int:
        """Bytes that may be posted to a link now; a link with nothing in flight takes at least one write."""
        return self._link_bytes - self._in_flight[link]

    def posted(self, link: LinkId, size: int) -> None:
        """A write of `size` bytes is in flight."""
        self._in_flight[link] += size

    def ended(self, link: LinkId, size: int) -> None:
        """It is terminal."""
        left = self._in_flight[link] - size
        if left > 0:
            self._in_flight[link] = left
        else:
            del self._in_flight[link]
