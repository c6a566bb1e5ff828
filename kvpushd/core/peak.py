# SPDX-License-Identifier: Apache-2.0
"""The highest rate at which a link was seen to carry bytes, lately."""

from __future__ import annotations

from dataclasses import dataclass

from kvpushd.core.words import SECOND, Instant

STRETCH: Instant = 100_000_000
"""Nanoseconds for which a link is busy: ends that are seen together make no great difference to its rate."""
LATELY: Instant = 10_000_000_000
"""Nanoseconds for which it holds. Then one stretch shows what the link carries with more in flight."""


@dataclass(slots=True)
class Peak:
    """Bytes per second of the best stretch, LATELY; 0 = none was long enough yet."""

    rate: float = 0.0
    trying: bool = False
    """Whether that is too old. A link whose way is longer for a while, for want of a processor, carries no
    more than is in flight: to follow its rate down would be to have less in flight, and less again."""
    _until: Instant = 0
    _since: Instant = 0
    _bytes: int = 0

    def begin(self, now: Instant) -> None:
        """The link was idle, and is not any more."""
        self._since, self._bytes = now, 0

    def carried(self, size: int, now: Instant) -> None:
        """A write of `size` bytes has ended."""
        self._bytes += size
        took = now - self._since
        if took < STRETCH:
            return
        seen = self._bytes * SECOND / took
        self.begin(now)
        if self.trying or seen >= self.rate:
            self.rate, self._until, self.trying = seen, now + LATELY, False
        elif now > self._until:
            self.trying = True
