# SPDX-License-Identifier: Apache-2.0
"""How fast a link takes bytes, and so how many to have in flight on it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpushd.core.words import SECOND, Instant

HORIZON: Instant = 20_000_000
"""What is in flight should be worth so many nanoseconds: long against the way of a completion and the next
post (1 to 2 ms on a busy machine), short against what a small transfer can bear to wait behind."""
WRITES = 3
"""In flight at a time: when one has ended the others last until the next is there, though that be late."""
SAMPLE: Instant = 5_000_000
"""Nanoseconds that a sample of the rate covers at least. Ends are seen when a mover polls, several at once:
the time from one to the next says nothing."""
WEIGHT = 0.25
"""What is forgotten of all earlier samples with each new one."""
LEAST_FLIGHT = 2 << 20
"""Bytes that may always be in flight."""
FIRST_FLIGHT = 4 << 20
"""Bytes in flight to a link whose rate is not known yet. On a slow one they stand before all that comes next;
on a fast one a few writes are enough to know better."""


@dataclass(slots=True)
class Pace:
    """The rate of one link, learned from its writes."""

    most_flight: int
    most_write: int
    rate: float = 0.0
    """Bytes per second; 0 = not known."""
    _begun: Instant = 0
    """Of the sample under way: since then, bytes have been in flight without a pause."""
    _gathered: int = 0
    """Bytes that it has."""
    _last_end: Instant = 0
    _bytes: float = 0.0
    """Of all samples, the older the less."""
    _time: float = 0.0
    """Nanoseconds that these took."""

    @property
    def flight(self) -> int:
        """Bytes to have in flight."""
        wanted = int(self.rate * HORIZON / SECOND) if self.rate else FIRST_FLIGHT
        return min(max(wanted, LEAST_FLIGHT), self.most_flight)

    @property
    def write(self) -> int:
        """Bytes of one write: a part of that, so that the link has others when one ends."""
        return min(self.flight // WRITES, self.most_write)

    def ended(self, size: int, posted: Instant, ended: Instant) -> None:
        """A write of `size` bytes was under way from `posted` to `ended`.

        A sample is what ends within `SAMPLE` or more of a link that is busy throughout. A pause begins a new
        one: what little was moved before it says how long the way is, not how wide.
        """
        if posted > self._last_end:
            self._begun, self._gathered = posted, 0
        self._gathered += size
        self._last_end = max(self._last_end, ended)
        took = self._last_end - self._begun
        if took < SAMPLE:
            return
        self._bytes += self._gathered - self._bytes * WEIGHT
        self._time += took - self._time * WEIGHT
        # Not the mean of the samples' rates: where ends are seen late, and then soon, that is too high.
        self.rate = self._bytes * SECOND / self._time
        self._begun, self._gathered = self._last_end, 0
