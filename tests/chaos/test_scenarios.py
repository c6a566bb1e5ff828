# SPDX-License-Identifier: Apache-2.0
"""The list of scenarios: the same for the same seed, and wide."""

from __future__ import annotations

import pytest

from testing.chaos.blows import rule_of
from testing.chaos.points import strikes
from testing.chaos.scenario import NODES_HIT, Blow, Cast, Cut, Phase, Point, Strike, Whom, draw
from testing.faults import catalog
from testing.faults.rules import Act

ALL = 360
POINTS = list(strikes())


def struck(scenarios):
    """Who was hit, how, and in which phase, where nothing else happened."""
    return {
        (one.phase, fault.whom, fault.blow)
        for one in scenarios
        for fault in one.faults
        if isinstance(fault, Strike) and len(one.faults) == 1
    }


def test_the_same_seed_gives_the_same_scenarios_and_another_one_others():
    assert draw(ALL, 7, POINTS) == draw(ALL, 7, POINTS)
    assert draw(ALL, 7, POINTS) != draw(ALL, 8, POINTS)


@pytest.mark.parametrize("count", [1, 10, 40, ALL, 500])
def test_as_many_are_drawn_as_asked_for_and_each_has_a_number_of_its_own(count):
    scenarios = draw(count, 3, POINTS)
    assert sorted(one.number for one in scenarios) == list(range(count))


def test_a_long_run_hits_everybody_in_every_way_in_every_phase():
    found = struck(draw(ALL, 11, POINTS))
    # A stopped D engine that has not seen what landed is how that phase is held.
    missing = {(p, w, b) for p in Phase for w in NODES_HIT for b in Blow} - found
    assert missing == {(Phase.LANDED, Whom.D_ENGINE, Blow.STOP)}
    assert {whom for _, whom, _ in found} == set(Whom)


def test_a_long_run_pulls_the_cable_in_every_phase_and_pairs_faults():
    scenarios = draw(ALL, 11, POINTS)
    assert {one.phase for one in scenarios if isinstance(one.faults[0], Cut)} == set(Phase)
    assert sum(len(one.faults) == 2 for one in scenarios) >= ALL // 5


def test_a_long_run_has_both_engines_stand_still_for_longer_than_they_are_waited_for():
    stops = {s.whom for one in draw(ALL, 11, POINTS) if one.silence for s in one.strikes}
    assert stops == {Whom.P_ENGINE, Whom.D_ENGINE}


def test_two_faults_of_a_scenario_never_hit_the_same_process():
    for one in draw(500, 5, POINTS):
        hit = [fault.whom for fault in one.strikes]
        assert len(hit) == len(set(hit))


def test_a_short_run_hits_everybody():
    assert {whom for _, whom, _ in struck(draw(40, 2, POINTS))} == set(Whom)


def test_casts_come_one_after_the_other_since_each_needs_processes_of_its_own():
    casts = [one.cast for one in draw(ALL, 4, POINTS)]
    assert casts == sorted(casts, key=list(Cast).index)


def test_a_long_run_strikes_fault_points_of_every_kind_of_process_in_every_way():
    points = [one.faults[0] for one in draw(ALL, 6, POINTS) if isinstance(one.faults[0], Point)]
    assert {point.process for point in points} == {"client", "daemon", "mover"}
    assert {point.act for point in points} == set(Act)


@pytest.mark.parametrize("point", [point for _, point in POINTS], ids=str)
def test_every_fault_of_the_list_can_happen(point):
    catalog.check(rule_of(point))
