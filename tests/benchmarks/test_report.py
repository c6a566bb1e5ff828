# SPDX-License-Identifier: Apache-2.0
"""A run's folder: what a reader and a script find in it."""

import json

import pytest

from benchmarks.report import tables
from benchmarks.report.record import Record
from benchmarks.report.statistics import paired_ratio, summary
from benchmarks.report.values import Bars, Lines, Outcome, Row, goal

GOAL = goal(2, "tail, kvpushd / against", "<=", 0.25, paired_ratio([1.0, 1.1], [9.0, 9.9]), "a1", "pull")
OUTCOME = Outcome(
    rows=[Row("a1", "kvpushd", 0, "trial", {"ttft_s": 0.65, "wire_bytes_per_s": 2e8})],
    goals=[GOAL],
    facts=["link at 160 MB/s"],
    tables=[tables.summaries("a1: per round", [("kvpushd", "ttft_s", summary([0.5, 0.6, 0.7]))])],
    plots=[
        Bars("tail", "Tail", "ms", ["a1", "g"], {"kvpushd": [(30.0, 20.0, 40.0), None]}),
        Lines(
            "sweep", "Sweep", "transfer / prefill", "TTFT / prefill", {"kvpushd": [(1.0, 1.1), (0.1, 1.0)]}
        ),
    ],
)


@pytest.fixture
def record(tmp_path):
    """A report without parts."""
    return Record(tmp_path / "2030-01-01", {"processor": "some"}, rounds=2, quick=True)


def test_results_hold_the_goals_and_every_raw_sample_in_base_units(record):
    record.add("engine", OUTCOME)
    results = json.loads((record.folder / "results.json").read_text())
    assert results["goals"] == [
        {
            "id": 2,
            "measure": "tail, kvpushd / against",
            "goal": "<= 0.25",
            "value": pytest.approx(1 / 9),
            "low": pytest.approx(1 / 9),
            "high": pytest.approx(1 / 9),
            "met": True,
            "scenario": "a1",
            "contender": "pull",
        }
    ]
    assert results["samples"] == [
        {
            "scenario": "a1",
            "contender": "kvpushd",
            "round": 0,
            "kind": "trial",
            "ttft_s": 0.65,
            "wire_bytes_per_s": 2e8,
        }
    ]
    assert results["machine"] == {"processor": "some"}


def test_a_report_shows_goals_facts_tables_and_the_plots_that_lie_beside_it(record):
    record.add("engine", OUTCOME)
    report = (record.folder / "report.md").read_text()
    assert "link at 160 MB/s" in report
    assert "| kvpushd | ttft_s | ms | 600 | 690 | 698 | 550 – 650 | 3 |" in report
    for plot in ("tail", "sweep"):
        assert f"({plot}.png)" in report
        assert (record.folder / f"{plot}.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_that_failed_is_named_and_the_others_keep_their_numbers(record):
    record.add("engine", OUTCOME)
    record.failed("wire", "WrongBytes: at 17")
    assert "**wire failed**: WrongBytes: at 17" in (record.folder / "report.md").read_text()
    assert json.loads((record.folder / "results.json").read_text())["failures"] == {
        "wire": "WrongBytes: at 17"
    }
    assert record.goals == [GOAL]


def test_latest_points_at_the_last_report(tmp_path):
    for name in ("2030-01-01", "2030-01-02"):
        Record(tmp_path / name, {}, rounds=1, quick=False).link()
    assert (tmp_path / "latest").resolve() == (tmp_path / "2030-01-02").resolve()


@pytest.mark.parametrize(
    ("measure", "shown"),
    [("ttft_s", (1e3, "ms")), ("wire_bytes_per_s", (1e-6, "MB/s")), ("ratio", (1.0, ""))],
)
def test_a_measures_name_says_its_unit(measure, shown):
    assert tables.unit_of(measure) == shown
