# SPDX-License-Identifier: Apache-2.0
"""How long a mover rests and waits."""

from __future__ import annotations

import pytest

from kvpushd.mover.attention import RECEIVING, Attention, Rest, longest_wait


def _settled(worked: float) -> float:
    rest = Rest(*RECEIVING)
    for _ in range(50):
        rest.after(worked)
    return rest.seconds


def test_a_mover_rests_longer_where_rounds_find_little_than_where_they_find_much() -> None:
    assert _settled(20e-6) > _settled(1e-3)


def test_a_rest_is_short_against_what_a_socket_holds_and_long_against_an_empty_round() -> None:
    # At 10 Gbit/s the longest is 2.5 MB, and a round that takes in as many is no short one.
    assert 50e-6 <= _settled(10.0) < _settled(0.0) <= 2e-3


def test_who_begins_anew_does_not_wait() -> None:
    rest = Rest(*RECEIVING)
    before = rest.seconds
    for _ in range(50):
        rest.after(0.0)
    rest.over()
    assert rest.seconds == before


def test_a_rest_stays_where_rounds_are_neither_short_nor_long() -> None:
    rest = Rest(*RECEIVING)
    for worked in (0.0, 0.0, 0.0):
        rest.after(worked)
    before = rest.seconds
    rest.after(200e-6)
    assert rest.seconds == before


@pytest.mark.parametrize("bell", [True, False])
def test_the_more_is_due_the_sooner_a_mover_looks(bell: bool) -> None:
    waits = [longest_wait(level, bell) for level in Attention]
    assert waits == sorted(waits, reverse=True)
    assert len(set(waits)) == len(waits)


def test_without_a_bell_a_mover_looks_sooner() -> None:
    for level in (Attention.EXPECTING, Attention.FILLING):
        assert longest_wait(level, bell=False) < longest_wait(level, bell=True)
