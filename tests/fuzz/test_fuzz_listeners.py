# SPDX-License-Identifier: Apache-2.0
"""Nonsense at every listener of a running daemon: an end with a reason, and nothing that stays.

The corpus is said first: each past finding is an entry of it. What is tried beyond is the same in each run;
`make fuzz` tries much more, and other things each time. A failure is shown as an entry of the corpus.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, note, settings

from tests.fuzz.conftest import GROWTH, Target
from tests.fuzz.doors.door import corpus, read, shown

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]

DOORS = ("engine", "peer", "sender", "admin", "fds", "raw-kvpushd", "raw-admin", "raw-peer", "http")
TLS_DOORS = ("tls-before", "tls-nobody", "tls-stranger", "tls-peer", "tls-inside", "tls-dialed")
QUICK, LONG = 30, 2000


@pytest.fixture
def behind(request: pytest.FixtureRequest, door: str) -> Target:
    """The daemon that a door is of."""
    found: Target = request.getfixturevalue("secured" if door in TLS_DOORS else "target")
    return found


def test_every_listener_has_its_door(target: Target, secured: Target) -> None:
    assert set(target.doors) == set(DOORS)
    assert set(secured.doors) == set(TLS_DOORS)


@pytest.mark.parametrize("door", [*DOORS, *TLS_DOORS])
def test_what_was_found_once_is_borne(behind: Target, door: str) -> None:
    entries = corpus(door)
    before = behind.state()
    for entry in entries:
        behind.doors[door].say(read(entry))
    behind.check(before)


def fuzz(target: Target, door: str, examples: int, *, same: bool) -> None:
    """Says so many things at a door, the same in each run or not. Raises AssertionError."""

    @settings(
        max_examples=examples,
        derandomize=same,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.doors[door].sayings())
    def said(what: list[bytes]) -> None:
        note(f"as an entry of tests/fuzz/corpus/{door}:\n{shown(what)}")
        target.doors[door].say(what)

    said()


def holds_still(target: Target, door: str, examples: int, *, same: bool) -> None:
    """Fuzzes in two halves: the first fills what is kept on purpose, the second must add nothing to it."""
    before = target.state()
    fuzz(target, door, examples // 2, same=same)
    target.check(before)
    filled = target.memory()
    fuzz(target, door, examples // 2, same=same)
    target.check(before)
    assert target.memory() - filled < GROWTH


@pytest.mark.parametrize("door", [*DOORS, *TLS_DOORS])
def test_nonsense_gets_an_end_with_a_reason_and_leaves_nothing(behind: Target, door: str) -> None:
    holds_still(behind, door, QUICK, same=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("door", [*DOORS, *TLS_DOORS])
def test_a_lot_of_nonsense_leaves_nothing(behind: Target, door: str) -> None:
    holds_still(behind, door, LONG, same=False)
