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
KEPT = 0.8
"""What counts of earlier samples after another `SAMPLE` of a busy link."""
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
    _in_flight: int = 0
    _full: bool = False
    """Whether, since the sample began, another write had no room. If not, there was less to move than may be
    in flight, which says nothing of what the link takes."""
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

    def posted(self, size: int) -> None:
        """A write of `size` bytes is under way."""
        self._in_flight += size
        self._full |= self._in_flight + self.write > self.flight

    def failed(self, size: int) -> None:
        """A write is terminal that says nothing of the link's rate."""
        self._in_flight = max(self._in_flight - size, 0)

    def ended(self, size: int, posted: Instant, ended: Instant) -> None:
        """A write of `size` bytes was under way from `posted` to `ended`.

        A sample is what ends within `SAMPLE` or more of a link that is busy throughout; or less, where it had
        all that may be in flight: a fast link is through with that before a sample is over. What few bytes
        are moved between pauses says how long the way is, not how wide.
        """
        full = self._in_flight + self.write > self.flight
        self._in_flight = max(self._in_flight - size, 0)
        if posted > self._last_end:
            if self._gathered:
                self._close()
            self._begun = posted
            self._full |= full
        self._gathered += size
        self._last_end = max(self._last_end, ended)
        if self._last_end - self._begun >= SAMPLE or not self._in_flight:
            self._close()

    def _close(self) -> None:
        """Ends the sample under way."""
        took = self._last_end - self._begun
        if self._full or (took >= SAMPLE and self._gathered * SECOND > self.rate * took > 0):
            # Not the mean of the samples' rates: where ends are seen late, and then soon, that is too high.
            kept = KEPT ** (took / SAMPLE)
            self._bytes = self._bytes * kept + self._gathered
            self._time = self._time * kept + max(took, 1)
            self.rate = self._bytes * SECOND / self._time
        self._begun, self._gathered, self._full = self._last_end, 0, False
