# SPDX-License-Identifier: Apache-2.0
"""How fast a link takes bytes, and so how many to have in flight on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvpushd.core.peak import Peak
from kvpushd.core.words import SECOND, Instant

HORIZON: Instant = 40_000_000
"""What is in flight should be worth so many nanoseconds: each write costs a daemon and its mover some CPU,
whatever it carries. (96 MiB at 176 MB/s took 0.45 s of it at 20 ms, 0.3 at 40, 0.27 at 80.)"""
CROWDED: Instant = 20_000_000
"""The same on a link on which transfers overtake one another: long against the way of a completion and the
next post (some milliseconds on a busy machine), short against what a small one can bear to wait behind."""
MEMORY: Instant = 60_000_000_000
"""For so many nanoseconds after one has overtaken another, the next is expected to: what is asked of a node
is of one kind for longer than a transfer takes."""
LONE = 1.5
"""What is in flight is never worth less than so many times what a write takes that finds nothing in flight.
Where that is longer, what is in flight would be all that the link seems to carry, and then less, and less."""
LONES = 4
"""Such writes, of which the quickest counts: one may have been unlucky."""
FARTHEST: Instant = 200_000_000
"""The most that they can make of it: a link may be so slow that a single write takes longer."""
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
    _now: Instant = 0
    _crowded_until: Instant = 0
    _in_flight: int = 0
    _full: bool = False
    """Whether, since the sample began, another write had no room."""
    _refused: bool = False
    """Whether the last that asked for room found none."""
    _most: int = 0
    """Bytes that were in flight at a time since then."""
    _counted: bool = False
    """Whether the sample before it did, and no pause was between."""
    _begun: Instant = 0
    """Of the sample under way: since then, bytes have been in flight without a pause."""
    _gathered: int = 0
    """Bytes that it has."""
    _last_end: Instant = 0
    _lone: deque[Instant] = field(default_factory=lambda: deque(maxlen=LONES))
    """What the last of those took."""
    _peak: Peak = field(default_factory=Peak)
    _bytes: float = 0.0
    """Of all samples, the older the less."""
    _time: float = 0.0
    """Nanoseconds that these took."""

    @property
    def flight(self) -> int:
        """Bytes to have in flight."""
        if not self.rate:
            return min(FIRST_FLIGHT, self.most_flight)
        lone = min(self._lone) if len(self._lone) == LONES else 0
        far = min(int(LONE * lone), FARTHEST)
        wanted = self.rate * max(HORIZON, far)
        if self._now < self._crowded_until:
            horizon = 2 * CROWDED if self._peak.trying else CROWDED
            wanted = max(self.rate * max(horizon, far), self._peak.rate * horizon)
        return min(max(int(wanted / SECOND), LEAST_FLIGHT), self.most_flight)

    @property
    def write(self) -> int:
        """Bytes of one write: a part of that, so that the link has others when one ends."""
        return min(self.flight // WRITES, self.most_write)

    def overtaken(self, now: Instant) -> None:
        """A transfer goes before one that had begun: what it had in flight is what this one waits for."""
        self._now, self._crowded_until = now, now + MEMORY

    def room(self, size: int) -> bool:
        """Whether a write of `size` bytes may be posted: a link with nothing in flight takes any."""
        self._refused = self._in_flight > 0 and self._in_flight + size > self.flight
        self._full |= self._refused
        return not self._refused

    def posted(self, size: int, now: Instant) -> None:
        """A write of `size` bytes is under way."""
        self._now = now
        self._in_flight += size
        self._full |= self._crammed

    def failed(self, size: int) -> None:
        """A write is terminal that says nothing of the link's rate."""
        self._in_flight = max(self._in_flight - size, 0)
        if not self._in_flight:
            self._gathered, self._full, self._most = 0, False, 0

    def ended(self, size: int, posted: Instant, ended: Instant) -> None:
        """A write of `size` bytes was under way from `posted` to `ended`.

        A sample is what ends within `SAMPLE` or more of a link that is busy throughout; or less, where it had
        all that may be in flight: a fast link is through with that before a sample is over. Few bytes say how
        long the way is, not how wide, and count for nothing.
        """
        full, most = self._crammed or self._refused, self._in_flight
        self._in_flight = max(self._in_flight - size, 0)
        if posted > self._last_end:
            self._lone.append(ended - posted)
            if self._gathered:
                self._close()
            self._begun, self._counted = posted, False
            self._peak.begin(posted)
            self._full |= full
        self._gathered += size
        self._most = max(self._most, most)
        self._last_end = max(self._last_end, ended)
        self._peak.carried(size, self._last_end)
        if self._last_end - self._begun >= SAMPLE or not self._in_flight:
            self._close()

    @property
    def _crammed(self) -> bool:
        """Whether another write of the usual size has no room. That of a block that moves as a whole may be
        larger: that there was none for it is known only when it asks."""
        return self._in_flight + self.write > self.flight

    def _close(self) -> None:
        """Ends the sample under way."""
        took = self._last_end - self._begun
        # At this rate, what is under way keeps the link busy for longer than any way takes: it is the link's.
        # A few bytes could as well have been long on their way.
        many = self._most >= LEAST_FLIGHT // 2
        slow = many and took >= SAMPLE and self._most * took >= CROWDED * self._gathered
        before, self._counted = self._counted, self._full or slow
        # So does what was under way with that and ended later, else only its slow half would count.
        if self._counted or before:
            # Not the mean of the samples' rates: where ends are seen late, and then soon, that is too high.
            kept = KEPT ** (took / SAMPLE)
            self._bytes = self._bytes * kept + self._gathered
            self._time = self._time * kept + max(took, 1)
            self.rate = self._bytes * SECOND / self._time
        self._begun, self._gathered, self._full, self._most = self._last_end, 0, False, 0
