# SPDX-License-Identifier: Apache-2.0
"""The tables of testing/guards are true: what they name is there, and a guard that is missing is noticed."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from testing.guards import trial
from testing.guards.guard import Guard, read
from testing.guards.tree import ROOT, Tree
from testing.guards.trial import Outcome
from tests.packaging.pages import named, rows

GUARDS = read()
REPORTS = [f"R{number}" for number in (*range(1, 28), 31, *range(36, 40))]
INVARIANTS = [f"invariant {number}" for number in range(1, 10)]
PROPERTIES = ("tests/core/test_ledger_stateful.py", "tests/core/test_plan_properties.py")
CHEAP = "blocks-are-matched-by-position"

each_guard = pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)


@each_guard
def test_a_guard_stands_in_the_source_once_and_its_tests_are_there(guard: Guard) -> None:
    guard.taken_out((ROOT / guard.file).read_text())
    assert guard.before != guard.after
    for test in guard.tests:
        file, name, *_ = test.split("::")
        assert re.search(rf"^(async )?(def {name}\(|{name} = )", (ROOT / file).read_text(), re.MULTILINE), (
            test
        )


def test_every_report_and_every_invariant_is_served_by_a_guard() -> None:
    served = {what for guard in GUARDS.values() for what in guard.serves}
    assert served == {*REPORTS, *INVARIANTS}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_names_a_test_that_fails_without_a_guard_of_it(report: str) -> None:
    failing = [test for guard in GUARDS.values() if report in guard.serves for test in guard.tests]
    names = next(named(row[-1]) for row in rows("reports.md") if row[0] == report)
    assert any(_is(test, folder, name) for test in failing for folder, name in names), failing


def _is(test: str, folder: str, name: str) -> bool:
    """Whether pytest's id is that of the test that a page names; a file that it names is not a test."""
    return test.startswith(f"tests/{folder}/") and test.partition("::test_")[2].startswith(name)


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_an_invariant_has_a_guard_whose_absence_a_property_shows(invariant: str) -> None:
    tests = [test for guard in GUARDS.values() if invariant in guard.serves for test in guard.tests]
    assert any(test.startswith(PROPERTIES) for test in tests), tests


def test_a_source_without_its_guard_names_nothing_that_is_not_there(tmp_path: Path) -> None:
    for guard in GUARDS.values():
        source = guard.taken_out((ROOT / guard.file).read_text())
        (tmp_path / f"{guard.name}.py").write_text(source)
    options = ["--isolated", "--select", "E9,F821", "--target-version", "py311"]
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, str(tmp_path)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def test_a_missing_guard_is_noticed_and_a_change_that_matters_to_nobody_is_not(tmp_path: Path) -> None:
    tree = Tree.copy(tmp_path / "tree")
    guard = GUARDS[CHEAP]
    harmless = replace(guard, before="runs merged", after="runs joined")
    broken = replace(guard, before="def window_bytes(", after="def window_sizes(")
    for change, outcome in ((guard, Outcome.FAILED), (harmless, Outcome.PASSED), (broken, Outcome.BROKEN)):
        assert trial.caught(tree, change) == dict.fromkeys(guard.tests, outcome)


def test_a_test_whose_process_crashes_has_failed_and_its_neighbours_have_not(tmp_path: Path) -> None:
    tree = Tree.copy(tmp_path / "tree")
    plan = GUARDS[CHEAP]
    crashing = replace(
        plan,
        before="        cuts: dict[_Groups, list[_Pieces]] = {}\n",
        after="        cuts = __import__('ctypes').string_at(0)\n",
        tests=(plan.tests[0], "tests/core/test_pace.py::test_an_unknown_link_starts_in_the_middle"),
    )
    failing, passing = crashing.tests
    assert trial.caught(tree, crashing) == {failing: Outcome.FAILED, passing: Outcome.PASSED}
