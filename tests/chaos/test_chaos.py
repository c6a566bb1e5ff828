# SPDX-License-Identifier: Apache-2.0
"""A few scenarios of `make chaos`, held against all that it holds a scenario against.

In each phase, on each kind of process, in each way; two faults at once; through a router; one rank of two,
whose engine is started for it. All are played before the first test, as there: one in which the machine let
nobody run is played again.
"""

from __future__ import annotations

import os

import pytest

from testing.chaos.__main__ import run
from testing.chaos.scenario import LONG, SHORT, Blow, Cast, Cut, Phase, Point, Scenario, Strike, Whom
from testing.chaos.stage import LEASE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.netns,
    pytest.mark.timeout(1200),  # of all, which the first one plays
    pytest.mark.skipif(os.geteuid() != 0, reason="making a network namespace needs root"),
]

PAIR = Cast.PAIR
SELECTION = [
    Scenario(0, PAIR, Phase.UNRESERVED, (Point("peer.send.Announce", "before", "fail", "daemon", "d"),)),
    Scenario(1, PAIR, Phase.QUEUED, (Strike(Whom.P_MOVER, Blow.KILL),)),
    Scenario(2, PAIR, Phase.BETWEEN, (Strike(Whom.P_DAEMON, Blow.KILL),)),
    Scenario(3, PAIR, Phase.POSTING, (Strike(Whom.D_DAEMON, Blow.STOP, LONG),)),
    Scenario(4, PAIR, Phase.SEALED, (Strike(Whom.D_MOVER, Blow.KILL),)),
    Scenario(5, PAIR, Phase.LANDED, (Strike(Whom.D_DAEMON, Blow.KILL),)),
    Scenario(6, PAIR, Phase.POSTING, (Strike(Whom.D_ENGINE, Blow.KILL),)),
    Scenario(7, PAIR, Phase.BETWEEN, (Strike(Whom.P_ENGINE, Blow.TERM),)),
    Scenario(8, PAIR, Phase.ANNOUNCED, (Cut(SHORT), Strike(Whom.P_MOVER, Blow.STOP, SHORT)), gap=0.3),
    Scenario(9, Cast.ROUTER, Phase.QUEUED, (Strike(Whom.ROUTER, Blow.KILL),)),
    Scenario(10, Cast.RANKS, Phase.BETWEEN, (Strike(Whom.LAST_RANK, Blow.KILL),), length=600),
]


@pytest.fixture(scope="module")
def account(harness, tmp_path_factory):
    return run(list(SELECTION), 0, tmp_path_factory.mktemp("chaos"), harness)


@pytest.mark.parametrize("scenario", SELECTION, ids=lambda scenario: scenario.name)
def test_nothing_is_wrong_late_lost_or_left_behind(account, scenario):
    (played,) = (one for one in account.played if one.scenario == scenario)
    assert played.judge(LEASE) == [], f"the machine let nobody run for {played.starved:.1f} s"
    assert played.ends
    assert account.wrong_bytes == 0
