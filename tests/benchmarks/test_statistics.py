# SPDX-License-Identifier: Apache-2.0
"""How sure a paired ratio is, and when a goal counts as met."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report.statistics import paired_difference, paired_ratio, percentile, summary
from benchmarks.report.values import goal

positive = st.floats(min_value=1e-3, max_value=1e3)


def test_a_machine_that_slows_down_changes_both_sides_of_a_pair_and_not_their_ratio():
    slower = [1.0, 2.0, 4.0, 8.0]
    ratio = paired_ratio([2 * s for s in slower], slower)
    assert (ratio.value, ratio.low, ratio.high, ratio.rounds) == (2.0, 2.0, 2.0, 4)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
def test_the_interval_lies_among_the_rounds_and_holds_their_median(rounds):
    ratio = paired_ratio([a for a, _ in rounds], [b for _, b in rounds])
    ratios = [a / b for a, b in rounds]
    assert min(ratios) * 0.999 <= ratio.low <= ratio.value * 1.001
    assert ratio.value * 0.999 <= ratio.high <= max(ratios) * 1.001


def test_one_bad_round_of_eight_does_not_move_the_ratio_but_widens_nothing_else_than_its_side():
    ratio = paired_ratio([1.0] * 7 + [9.0], [1.0] * 8)
    assert ratio.value == 1.0
    assert ratio.low == 1.0


@pytest.mark.parametrize(
    ("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [float("nan")])]
)
def test_what_is_no_pair_of_positive_values_is_refused(above, below):
    with pytest.raises(ValueError, match=r"pairs|positive"):
        paired_ratio(above, below)


def test_a_difference_is_that_of_each_round_and_may_be_negative():
    found = paired_difference([3.0, 5.0, 2.0], [1.0, 3.0, 3.0])
    assert (found.value, found.low, found.high, found.rounds) == (2.0, -1.0, 2.0, 3)


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [float("inf")])])
def test_what_is_no_pair_of_finite_values_has_no_difference(above, below):
    with pytest.raises(ValueError, match=r"pairs|finite"):
        paired_difference(above, below)


def test_a_goal_is_met_only_if_the_worse_end_of_the_interval_meets_it():
    ratio = paired_ratio([1.5, 1.7, 1.9, 1.7], [1.0] * 4)
    assert ratio.low < 1.6 < ratio.value
    assert not goal(1, "TTFT", ">=", 1.6, ratio, "a1", "pull").met
    assert goal(1, "TTFT", ">=", ratio.low, ratio, "a1", "pull").met
    assert not goal(2, "tail", "<=", ratio.value, ratio, "a1", "pull").met
    assert goal(2, "tail", "<=", ratio.high, ratio, "a1", "pull").met


def test_a_summary_has_the_median_the_upper_percentiles_and_the_middle_half():
    found = summary([float(v) for v in range(101)])
    assert (found.count, found.median, found.p95, found.p99) == (101, 50.0, 95.0, 99.0)
    assert (found.low, found.high) == (25.0, 75.0)


def test_nothing_has_no_summary_and_no_percentile():
    with pytest.raises(ValueError, match="no samples"):
        summary([])
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 95)
