# SPDX-License-Identifier: Apache-2.0
"""How many bytes are in flight to a link follows from how fast it takes them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest

from kvpushd.core.pace import CROWDED, FIRST_FLIGHT, HORIZON, LEAST_FLIGHT, MEMORY, Pace
from kvpushd.core.peak import LATELY
from kvpushd.core.words import SECOND, Instant

MIB = 1 << 20
MS: Instant = SECOND // 1000
MOST = 256 * MIB


@dataclass
class Link:
    """A link of `rate` bytes per second, between a mover that posts and one that is seen to end writes.

    Posting takes the mover `post`, one write after another; the bytes need `way` from end to end; ends are
    seen only each `look`, and the next writes are decided `turn` later. No write but the last is smaller than
    `whole`.
    """

    rate: float
    post: Instant = MS // 10
    way: Instant = MS // 10
    look: Instant = MS // 50
    turn: Instant = MS // 2
    whole: int = 0
    pace: Pace = field(default_factory=lambda: Pace(MOST, 64 * MIB))
    now: Instant = 0
    _poster: Instant = 0
    _wire: Instant = 0
    _most: int = 0

    def carry(self, total: int, size: int = 1 << 60) -> float:
        """Moves so many bytes in writes of at most `size`, and says how many per second it carried."""
        begun, left, flying, count = self.now, total, 0, 0
        ends: list[tuple[Instant, int, Instant, int]] = []
        while left or ends:
            while left:
                cut = min(max(self.pace.write, self.whole), left, size)
                if not self.pace.room(cut):
                    break
                left, flying, count = left - cut, flying + cut, count + 1
                self._most = max(self._most, flying)
                self.pace.posted(cut, self.now)
                self._poster = posted = max(self._poster, self.now) + self.post
                self._wire = max(self._wire, posted) + int(cut * SECOND / self.rate)
                seen = -(-(self._wire + self.way) // self.look) * self.look
                heapq.heappush(ends, (seen, count, posted, cut))
            seen, _, posted, cut = heapq.heappop(ends)
            self.now = max(self.now, seen + self.turn)
            flying -= cut
            self.pace.ended(cut, posted, seen)
        return total * SECOND / (self.now - begun)

    @property
    def most_in_flight(self) -> int:
        """Ever."""
        return self._most


@pytest.mark.parametrize("rate", [2e8, 1e9, 4e9])
def test_what_is_in_flight_is_worth_the_horizon(rate: float) -> None:
    link = Link(rate)
    link.carry(int(2 * rate))
    assert link.pace.flight == pytest.approx(rate * HORIZON / SECOND, rel=0.1)


def test_less_is_in_flight_where_transfers_overtake_one_another_and_for_a_while_after() -> None:
    link = Link(1e9)
    link.carry(1 << 30)
    link.pace.overtaken(link.now)
    assert link.pace.flight == pytest.approx(1e9 * CROWDED / SECOND, rel=0.1)
    link.carry(1 << 30)
    assert link.pace.flight == pytest.approx(1e9 * CROWDED / SECOND, rel=0.1)
    link.now += MEMORY
    link.carry(1 << 30)
    assert link.pace.flight == pytest.approx(1e9 * HORIZON / SECOND, rel=0.1)


@pytest.mark.parametrize("way", [25 * MS, 100 * MS])
@pytest.mark.parametrize("rate", [2e8, 1e9])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_long_way_is_not_taken_for_a_slow_link(rate: float, way: Instant, crowded: bool) -> None:
    link = Link(rate, way=way)
    for _ in range(20):
        if crowded:
            link.pace.overtaken(link.now)
        link.carry(int(rate / 4))
        link.now += SECOND
    assert link.carry(int(2 * rate)) > 0.75 * rate
    assert link.most_in_flight < 3 * max(rate * max(way, HORIZON) / SECOND, FIRST_FLIGHT)


@pytest.mark.parametrize("rate", [2e8, 1e9])
def test_a_way_that_becomes_longer_does_not_make_a_crowded_link_slower_and_slower(rate: float) -> None:
    link = Link(rate)
    link.pace.overtaken(0)
    link.carry(int(rate))
    link.way = CROWDED
    assert link.carry(int(2 * rate)) > 0.5 * rate
    for _ in range(5):  # longer than any rate is remembered
        link.pace.overtaken(link.now)
        assert link.carry(int(rate * 2 * LATELY / SECOND)) > 0.45 * rate


def test_a_crowded_link_that_became_slower_has_less_in_flight_once_that_is_known() -> None:
    link = Link(1e9)
    link.pace.overtaken(0)
    link.carry(int(2e9))
    link.rate = 2e8
    link.carry(int(2e8 * 2 * LATELY / SECOND))
    assert link.pace.flight == pytest.approx(2e8 * CROWDED / SECOND, rel=0.25)


@pytest.mark.parametrize("look", [MS // 50, MS, 5 * MS])
@pytest.mark.parametrize("turn", [MS // 10, MS, 3 * MS])
@pytest.mark.parametrize("rate", [2e8, 1e9, 5e9, 1e10])
def test_a_link_is_busy_however_late_its_ends_are_seen(rate: float, turn: Instant, look: Instant) -> None:
    link = Link(rate, look=look, turn=turn)
    link.carry(int(rate))
    assert link.carry(int(rate)) > 0.9 * rate
    assert link.most_in_flight < 1.5 * max(rate * HORIZON / SECOND, FIRST_FLIGHT)


def test_a_link_that_carries_all_that_may_be_in_flight_at_once_is_found_to_be_fast() -> None:
    """Its writes all end before a sample is over, and are seen at one look."""
    link = Link(5e10, way=MS // 100, turn=MS // 5)
    link.carry(1 << 30)
    assert link.pace.flight == MOST


def test_a_slow_link_still_has_something_in_flight() -> None:
    link = Link(1e6)
    link.carry(64 * MIB)
    assert link.pace.flight == LEAST_FLIGHT


def test_a_fast_link_has_no_more_in_flight_than_is_allowed() -> None:
    link = Link(1e11, post=0, way=0, turn=0)
    link.carry(4 << 30)
    assert link.pace.flight == MOST
    assert link.pace.write == 64 * MIB
    assert link.most_in_flight <= MOST


def test_an_unknown_link_starts_in_the_middle() -> None:
    assert Pace(MOST, 64 * MIB).flight == FIRST_FLIGHT


def test_small_transfers_say_nothing_of_a_link_that_is_not_known() -> None:
    link = Link(2e9)
    for _ in range(50):
        link.carry(4096)
        link.now += SECOND
    assert not link.pace.rate


@pytest.mark.parametrize("pause", [0, SECOND])
def test_small_transfers_do_not_make_a_fast_link_look_slow(pause: Instant) -> None:
    link = Link(2e9)
    link.carry(1 << 30)
    wide = link.pace.flight
    for _ in range(50):
        link.carry(4096)
        link.now += pause
    assert link.pace.flight == pytest.approx(wide, rel=0.05)


def test_small_writes_without_a_pause_do_not_make_a_fast_link_look_slow() -> None:
    pace, at = Pace(MOST, 64 * MIB, rate=2e9), 0
    wide = pace.flight
    pace.posted(65536, 0)
    for _ in range(200):
        pace.posted(65536, at)
        pace.ended(65536, at, at + MS)
        at += MS
    assert pace.flight == wide


@pytest.mark.parametrize("whole", [MIB, 2 * MIB, 5 * MIB // 2, 3 * MIB, 5 * MIB, 20 * MIB])
@pytest.mark.parametrize("rate", [2e8, 1e9, 5e9])
def test_a_link_is_busy_though_its_blocks_move_as_a_whole(rate: float, whole: int) -> None:
    link = Link(rate, whole=whole)
    link.carry(int(2 * rate))
    assert link.carry(int(2 * rate)) > 0.9 * rate


@pytest.mark.parametrize("whole", [MIB, 6 * MIB // 5, 4 * MIB, 5 * MIB])
def test_a_link_that_stood_still_is_busy_again(whole: int) -> None:
    link = Link(1e9, whole=whole)
    link.carry(1 << 30)
    for _ in range(2):
        link.pace.posted(whole, link.now)
    link.now += 10 * SECOND
    for _ in range(2):
        link.pace.ended(whole, link.now - 10 * SECOND, link.now)
    link.carry(1 << 30)
    assert link.carry(1 << 30) > 0.9e9


def test_a_few_bytes_that_are_long_on_their_way_do_not_make_a_fast_link_look_slow() -> None:
    link = Link(1e9)
    link.carry(1 << 30)
    wide = link.pace.flight
    link.way = 25 * MS
    for _ in range(10):
        link.carry(40_000)
        link.now += SECOND
    assert link.pace.flight == wide


@pytest.mark.parametrize("size", [14 * MIB, 1 << 28])
def test_a_link_that_has_become_slow_is_found_to_be(size: int) -> None:
    link = Link(5e9)
    link.carry(1 << 30)
    link.rate = 2e8
    for _ in range(1 + (1 << 28) // size):
        link.carry(size)
        link.now += SECOND
    assert link.pace.flight == pytest.approx(2e8 * HORIZON / SECOND, rel=0.1)


def test_the_time_that_a_write_stood_in_line_is_not_the_links() -> None:
    pace = Pace(MOST, 64 * MIB)
    for _ in range(2):
        pace.posted(8 * MIB, 0)
    pace.ended(8 * MIB, 0, 8 * MS)
    pace.ended(8 * MIB, 0, 16 * MS)
    assert pace.rate == pytest.approx(MIB * 1000)


def test_writes_that_fail_count_for_nothing() -> None:
    pace = Pace(MOST, 64 * MIB, rate=2e9)
    for _ in range(50):
        pace.posted(16 * MIB, 0)
        pace.failed(16 * MIB)
    assert pace.rate == 2e9
    pace.posted(4096, 0)
    pace.ended(4096, 0, 2 * MS)
    assert pace.rate == 2e9


def test_ends_that_are_seen_together_do_not_make_a_link_look_fast() -> None:
    pace = Pace(MOST, 64 * MIB)
    for begun in range(0, 400 * MS, 10 * MS):
        # 2 MiB in 10 ms, of which a mover hears at one go.
        for _ in range(2):
            pace.posted(MIB, begun)
        pace.ended(MIB, begun, begun + 10 * MS)
        pace.ended(MIB, begun, begun + 10 * MS + 1000)
    assert pace.rate == pytest.approx(2 * MIB * 100, rel=0.05)


def test_ends_that_are_seen_late_and_then_soon_do_not_make_a_link_look_fast() -> None:
    pace = Pace(MOST, 64 * MIB)
    for begun in range(0, 1000 * MS, 30 * MS):
        # 8 MiB each 15 ms, of which a busy mover sees every other one 9 ms late.
        for _ in range(2):
            pace.posted(8 * MIB, begun)
        pace.ended(8 * MIB, begun, begun + 24 * MS)
        pace.ended(8 * MIB, begun, begun + 30 * MS)
    assert pace.rate == pytest.approx(16 * MIB * SECOND / (30 * MS), rel=0.1)
