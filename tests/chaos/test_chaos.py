# SPDX-License-Identifier: Apache-2.0
"""A few scenarios of `make chaos` on one warm pair of engines, in each phase and on each kind of process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from testing.chaos.actor import Actor
from testing.chaos.scenario import SHORT, Blow, Cast, Cut, Phase, Point, Scenario, Strike, Whom
from testing.chaos.stage import Stage

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="making a network namespace needs root"),
]

SELECTION = [
    (Phase.UNRESERVED, Point("peer.send.Announce", "before", "fail", "daemon", "d")),
    (Phase.QUEUED, Strike(Whom.P_MOVER, Blow.KILL)),
    (Phase.BETWEEN, Strike(Whom.P_DAEMON, Blow.KILL)),
    (Phase.POSTING, Cut(SHORT)),
    (Phase.SEALED, Strike(Whom.D_MOVER, Blow.KILL)),
    (Phase.LANDED, Strike(Whom.D_DAEMON, Blow.KILL)),
    (Phase.POSTING, Strike(Whom.D_ENGINE, Blow.KILL)),
]


@pytest.fixture(scope="module")
def actor(harness):
    with tempfile.TemporaryDirectory(prefix="kvc") as folder, Stage(Path(folder), harness) as stage:
        yield Actor(stage)


@pytest.mark.parametrize(
    ("phase", "fault"), SELECTION, ids=[f"{phase.value}: {fault}" for phase, fault in SELECTION]
)
def test_nothing_is_wrong_lost_or_left_behind(actor, phase, fault):
    played = actor.play(Scenario(0, Cast.PAIR, phase, (fault,)))
    assert played.fired == [str(fault)]
    assert played.troubles == []
    assert played.deaths == []
    assert played.leftovers == []
    assert actor.books.wrong_bytes == 0
