# SPDX-License-Identifier: Apache-2.0
"""The alarm of links that are slower than they should be."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kvpushd.core.words import LinkId
from kvpushd.node.floor import Floor

A, B = LinkId("a#1"), LinkId("b#2")


def floor(rates: dict[LinkId, float], bytes_per_second: int = 100) -> Floor:
    return Floor(bytes_per_second, lambda: rates.keys(), lambda link: rates[link], lambda: "tcp/eth0")


@pytest.mark.parametrize(("rate", "undercut"), [(0, False), (1, True), (99.9, True), (100, False)])
def test_only_a_rate_that_is_known_is_held_against_the_floor(rate: float, undercut: bool) -> None:
    assert floor({A: rate}).is_undercut_by(A) is undercut


def test_without_a_floor_no_link_is_too_slow() -> None:
    assert not floor({A: 1}, bytes_per_second=0).is_undercut_by(A)


def test_a_link_that_falls_below_is_said_once_with_what_carries_it_and_again_when_it_is_back() -> None:
    rates: dict[LinkId, float] = {A: 500, B: 500}
    watched = floor(rates)
    with capture_logs() as said:
        watched.look()
        rates[A] = 20
        watched.look()
        watched.look()
        rates[A] = 200
        watched.look()
        del rates[A]
        watched.look()
    assert [(line["log_level"], line["link"]) for line in said] == [("warning", A), ("info", A)]
    assert (said[0]["bytes_per_second"], said[0]["lanes"]) == (20, "tcp/eth0")
