# SPDX-License-Identifier: Apache-2.0
"""Who ends and was not hit is counted as a death, and fails its scenario and the run."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from testing.chaos.__main__ import look_again
from testing.chaos.account import Account, End, Played
from testing.chaos.blows import Blows
from testing.chaos.books import Books
from testing.chaos.healing import Healing
from testing.chaos.lives import Lives
from testing.chaos.scenario import Blow, Cast, Phase, Point, Scenario, Strike, Whom
from testing.chaos.stage import LEASE, RANKS, D, P

LATE = End(D, LEASE + 3.0, "length")


class Engine:
    def __init__(self):
        self.lives = True

    def kill(self, signum=None):
        self.lives = False


class Node:
    def __init__(self):
        self.pid, self.restarts = 100, 0
        self.running = True

    def launch(self):
        self.pid, self.running, self.restarts = self.pid + 1, True, 0

    def wait_ready(self):
        return self

    def signal(self, number):
        """It goes on."""


class FakeStage:
    """What Lives, Blows and Healing look at, without processes."""

    def __init__(self):
        self.engines = {P: Engine(), D: Engine()}
        self.nodes = {name: Node() for name in "pde"}
        self.router = None
        self.ranks = []
        self.board = SimpleNamespace(record=[])

    def alive(self, name):
        return self.engines[name].lives

    def rank_pids(self, name):
        return list(self.ranks)

    def status(self, name):
        return SimpleNamespace(movers=[SimpleNamespace(restarts=self.nodes[name].restarts)])


@pytest.fixture
def stage():
    return FakeStage()


@pytest.fixture
def lives(stage):
    return Lives(stage)


def blows(stage, *faults):
    found = Blows(stage, Scenario(0, Cast.PAIR, Phase.SEALED, faults))
    for fault in faults:
        if isinstance(fault, Strike) and fault.whom in (Whom.P_ENGINE, Whom.D_ENGINE):
            found.strike(fault)
    return found


def test_nobody_is_missed_while_all_live(stage, lives):
    assert lives.lost() == []
    assert lives.lost_movers() == []


def test_an_engine_that_ends_by_itself_is_lost_once_and_one_that_was_hit_is_not(stage, lives):
    hit = blows(stage, Strike(Whom.D_ENGINE, Blow.KILL))
    assert lives.lost(hit) == []
    stage.engines[P].lives = False
    assert lives.lost(hit) == [P]
    assert lives.lost(hit) == []


def test_an_engine_that_was_started_after_a_kill_is_not_excused_by_it(stage, lives):
    hit = blows(stage, Strike(Whom.D_ENGINE, Blow.KILL))
    assert lives.lost(hit) == []
    stage.engines[D] = Engine()
    lives.take()
    stage.engines[D].lives = False
    assert lives.lost(hit) == [D]


def test_a_daemon_that_ends_by_itself_is_lost_also_that_of_the_third_node(stage, lives):
    hit = blows(stage, Strike(Whom.D_DAEMON, Blow.KILL))
    hit._ended["d"] = stage.nodes["d"].pid
    for node in stage.nodes.values():
        node.running = False
    assert lives.lost(hit) == ["the daemon of p", "the daemon of e"]


def test_a_rank_that_ends_while_its_engine_goes_on_is_lost(stage, lives):
    with subprocess.Popen(["sleep", "60"]) as rank:
        stage.engines[RANKS], stage.ranks = Engine(), [rank.pid]
        lives.take_ranks()
        lives.take()
        assert lives.lost() == []
        rank.kill()
        rank.wait()
        assert lives.lost() == [f"a rank of {RANKS}"]


@pytest.mark.parametrize(
    ("fault", "excused"),
    [
        (Strike(Whom.P_MOVER, Blow.KILL), 1),
        (Strike(Whom.P_MOVER, Blow.STOP, 4.0), 1),
        (Strike(Whom.P_MOVER, Blow.STOP, 0.5), 0),
        (Strike(Whom.D_MOVER, Blow.KILL), 0),
        (Point("mover.send.WriteEnded", "before", "repeat", "mover", "p"), 1),
        (Point("peer.send.Announce", "before", "drop", "daemon", "p"), 0),
    ],
    ids=str,
)
def test_a_mover_may_die_once_of_a_blow_to_it_and_never_of_another(stage, lives, fault, excused):
    stage.nodes["p"].restarts = 2
    assert lives.lost_movers(blows(stage, fault)) == ["the mover of p"] * (2 - excused)


def test_a_daemon_that_was_started_again_has_lost_no_mover_since(stage, lives):
    hit = blows(stage, Strike(Whom.P_MOVER, Blow.KILL))
    stage.nodes["p"].launch()
    assert lives.lost_movers(hit) == []
    stage.nodes["p"].restarts = 1
    assert lives.lost_movers(hit) == ["the mover of p"]


def test_a_router_that_ends_by_itself_is_lost(stage):
    stage.router = SimpleNamespace(pid=5, poll=lambda: None)
    lives = Lives(stage)
    assert lives.lost() == []
    stage.router.poll = lambda: 1
    assert lives.lost() == ["the router"]


def test_what_healing_would_hide_is_held_against_the_scenario(stage, lives):
    played = Played(Scenario(0, Cast.PAIR, Phase.SEALED, ()))
    healing = Healing(stage, Books(stage), lives, blows(stage), played.scenario, played)
    stage.engines[P].lives = False
    healing.count_deaths()
    stage.engines[P] = Engine()
    lives.take()
    healing.count_deaths()
    assert played.deaths == [P]
    account = Account(1, LEASE, [played])
    assert account.last_line()["engine_deaths"] == 1
    assert not account.well


def test_what_is_wrong_with_a_repeated_look_is_counted_as_what_it_is(monkeypatch):
    scenario = Scenario(0, Cast.PAIR, Phase.SEALED, (), beside=True)
    rates = iter([0.97, 0.99])

    def play(scenario):
        return Played(scenario, undisturbed=next(rates), deaths=[P], leftovers=["a pool"], ends=[LATE])

    played = Played(scenario, undisturbed=0.9)
    look_again(SimpleNamespace(lost=False, play=play), played)
    last = Account(1, LEASE, [played]).last_line()
    assert played.undisturbed == 0.97
    assert (last["engine_deaths"], last["leftovers"], last["late_ends"]) == (2, 2, 2)
    assert len(played.judge(LEASE)) == 6
