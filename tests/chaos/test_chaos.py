# SPDX-License-Identifier: Apache-2.0
"""A few scenarios of `make chaos`, held against all that it holds a scenario against.

On one stage, the dearest last: in each phase, on each kind of process, in each way; two faults at once;
through a router; and one rank of two, whose engine is started for it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from testing.chaos.__main__ import turn
from testing.chaos.actor import Actor
from testing.chaos.scenario import LONG, SHORT, Blow, Cast, Cut, Phase, Point, Scenario, Strike, Whom
from testing.chaos.stage import LEASE, Stage

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.netns,
    pytest.mark.timeout(300),
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
def actor(harness):
    with tempfile.TemporaryDirectory(prefix="kvc") as folder, Stage(Path(folder), harness) as stage:
        yield Actor(stage)


@pytest.mark.parametrize("scenario", SELECTION, ids=lambda scenario: scenario.name)
def test_nothing_is_wrong_late_lost_or_left_behind(actor, scenario):
    played = turn(actor, scenario)
    assert played.judge(LEASE) == []
    assert played.ends
    assert actor.books.wrong_bytes == 0
