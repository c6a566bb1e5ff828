# SPDX-License-Identifier: Apache-2.0
"""How many bytes are in flight to a link follows from how fast it takes them."""

from __future__ import annotations

import pytest

from kvpushd.core.pace import FIRST_FLIGHT, HORIZON, LEAST_FLIGHT, Pace
from kvpushd.core.words import SECOND

MIB = 1 << 20


def link(rate: float, writes: int, size: int | None = None) -> Pace:
    """A pace that has seen so many writes, back to back, on a link of `rate` bytes per second."""
    pace = Pace(256 * MIB, 64 * MIB)
    now = 0
    for _ in range(writes):
        carried = size or pace.write
        ended = now + int(carried * SECOND / rate)
        pace.ended(carried, now, ended)
        now = ended
    return pace


@pytest.mark.parametrize("rate", [2e8, 1e9, 5e9])
def test_what_is_in_flight_is_worth_the_horizon(rate: float) -> None:
    assert link(rate, 30).flight == pytest.approx(rate * HORIZON / SECOND, rel=0.05)


def test_a_slow_link_still_has_something_in_flight() -> None:
    assert link(1e6, 30).flight == LEAST_FLIGHT


def test_a_fast_link_has_no_more_in_flight_than_is_allowed() -> None:
    pace = link(1e11, 1000)
    assert pace.flight == 256 * MIB
    assert pace.write == 64 * MIB


def test_an_unknown_link_starts_in_the_middle() -> None:
    assert Pace(256 * MIB, 64 * MIB).flight == FIRST_FLIGHT


def test_small_writes_do_not_make_a_fast_link_look_slow() -> None:
    pace = link(2e9, 30)
    wide = pace.flight
    for at in range(50):
        pace.ended(4096, at * SECOND, at * SECOND + 500_000)
    assert pace.flight == wide


def test_the_time_that_a_write_stood_in_line_is_not_the_links() -> None:
    pace = Pace(256 * MIB, 64 * MIB)
    second = SECOND // 1000
    pace.ended(8 * MIB, 0, 8 * second)
    pace.ended(8 * MIB, 0, 16 * second)
    assert pace.rate == pytest.approx(MIB * 1000)


def test_ends_that_are_seen_together_do_not_make_a_link_look_fast() -> None:
    pace = Pace(256 * MIB, 64 * MIB)
    second = SECOND // 1000
    for begun in range(0, 400 * second, 10 * second):
        # 2 MiB in 10 ms, of which a mover hears at one go.
        pace.ended(MIB, begun, begun + 10 * second)
        pace.ended(MIB, begun, begun + 10 * second + 1000)
    assert pace.rate == pytest.approx(2 * MIB * 100, rel=0.05)


def test_ends_that_are_seen_late_and_then_soon_do_not_make_a_link_look_fast() -> None:
    pace = Pace(256 * MIB, 64 * MIB)
    second = SECOND // 1000
    for begun in range(0, 1000 * second, 30 * second):
        # 8 MiB each 15 ms, of which a busy mover sees every other one 9 ms late.
        pace.ended(8 * MIB, begun, begun + 24 * second)
        pace.ended(8 * MIB, begun, begun + 30 * second)
    assert pace.rate == pytest.approx(16 * MIB * SECOND / (30 * second), rel=0.1)
