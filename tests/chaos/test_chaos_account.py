# SPDX-License-Identifier: Apache-2.0
"""What an account holds against a scenario."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from testing.chaos.account import Account, End, Played
from testing.chaos.pulse import BEAT, LEAST, Pulse
from testing.chaos.scenario import LONGER, Blow, Cast, Cut, Phase, Scenario, Strike, Whom

LEASE = 5.0
KILL = Strike(Whom.D_DAEMON, Blow.KILL)
STAND_STILL = """
import os, signal, sys, time
os.kill(int(sys.argv[1]), signal.SIGSTOP)
time.sleep(1)
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def played(*faults, **seen):
    scenario = Scenario(0, Cast.PAIR, Phase.SEALED, faults or (KILL,))
    fired = [str(fault) for fault in scenario.faults]
    return Played(scenario, **{"fired": fired, "ends": [End("D", 0.1, "length")], **seen})


def test_what_went_as_promised_is_well():
    one = played(said=0.1, heard=0.2, registered=1.5, replaced=0.6, undisturbed=0.97)
    assert one.judge(LEASE) == []
    assert Account(1, LEASE, [one]).well


@pytest.mark.parametrize(
    "seen",
    [
        {"fired": []},
        {"ends": [End("D", LEASE + 1.5, "length")]},
        {"deaths": ["P"]},
        {"leftovers": ["D has 3 free of 9 blocks"]},
        {"troubles": ["D said [1], not [2]"]},
        {"said": 1.2},
        {"heard": 1.2},
        {"registered": 2.5},
        {"replaced": 1.1},
        {"again": 2.3},
        {"undisturbed": 0.9},
    ],
    ids=lambda seen: next(iter(seen)),
)
def test_what_did_not_fails_and_is_counted(seen):
    one = played(**seen)
    assert len(one.judge(LEASE)) == 1
    account = Account(1, LEASE, [one, played()])
    assert not account.well
    assert [failed["scenario"] for failed in account.last_line()["failed"]] == [one.scenario.name]


def test_two_faults_may_hide_each_other_but_neither_ends_nor_bytes():
    assert played(KILL, Cut(1.0), said=3.0).judge(LEASE) == []
    assert played(KILL, Cut(1.0), ends=[End("D", 9.0, "length")]).judge(LEASE)


def test_a_request_beside_a_daemon_that_stands_still_is_waited_for_and_none_on_the_other_side():
    stopped = Strike(Whom.D_DAEMON, Blow.STOP, LONGER)
    assert played(stopped, ends=[End("D", 10.5, "length")]).judge(LEASE) == []
    assert played(stopped, ends=[End("D", 11.5, "length")]).judge(LEASE)
    assert played(stopped, ends=[End("P", 10.5, "length")]).judge(LEASE)


def test_kv_that_does_not_come_though_only_a_mover_was_told_to_end_is_missed():
    told = Strike(Whom.P_MOVER, Blow.TERM)
    assert played(told, ends=[End("D", 0.1, "length", external=99)]).judge(LEASE) == []
    assert played(told, ends=[End("D", 0.1, "length")]).judge(LEASE)


def test_what_the_machine_kept_from_all_is_not_counted_against_a_promise():
    late = {"ends": [End("D", LEASE + 4.0, "length")], "said": 3.0}
    assert played(**late, starved=3.1).judge(LEASE) == []
    assert len(played(**late, starved=1.9).judge(LEASE)) == 2


def test_a_machine_that_lets_nobody_run_is_noticed():
    with Pulse() as pulse:
        subprocess.run([sys.executable, "-c", STAND_STILL, str(os.getpid())], check=True)
        deadline = time.monotonic() + 5
        while not pulse.starved and time.monotonic() < deadline:
            time.sleep(BEAT)
    assert pulse.starved > LEAST


def test_wrong_bytes_fail_a_run_whatever_its_scenarios_say():
    assert not Account(1, LEASE, [played()], wrong_bytes=1).well


def test_faults_are_counted_by_the_phase_that_they_struck():
    account = Account(1, LEASE, [played(), played(KILL, Cut(1.0))])
    assert account.last_line()["faults_fired_by_phase"] == {"sealed": 3}


def test_the_report_has_a_row_for_each_figure_and_names_what_failed():
    text = Account(1, LEASE, [played(said=0.25), played(deaths=["P"])]).markdown()
    assert "| the other side heard of a death, s | 1 | 0.250 | 1 |" in text
    assert "P died" in text


@pytest.mark.parametrize(
    ("seen", "vain"),
    [
        ({"starved": 4.0, "deaths": ["the mover of p"]}, True),
        ({"starved": 4.0, "troubles": ["TimeoutError: it is not sealed"], "fired": []}, True),
        ({"starved": 2.0, "deaths": ["the mover of p"]}, False),
        ({"starved": 4.0, "deaths": ["the mover of p", "P"]}, False),
        ({"starved": 4.0, "deaths": ["the daemon of p"]}, False),
        ({"starved": 4.0, "leftovers": ["D has 3 free of 9 blocks"], "fired": []}, False),
        ({"starved": 4.0, "troubles": ["D said [1], not [2]"]}, False),
        ({"starved": 4.0, "troubles": ["a request of D never ended"]}, False),
        ({"starved": 4.0}, False),
    ],
)
def test_a_play_in_which_nobody_could_run_shows_nothing_but_deaths_and_what_is_left(seen, vain):
    one = played(**seen)
    assert one.shows_nothing(LEASE, silence=3.0) is vain
    account = Account(1, LEASE, [], in_vain=[one])
    assert account.plays_in_vain(one.scenario) == 1
    assert account.record()["in_vain"][0]["starved"] == seen["starved"]
