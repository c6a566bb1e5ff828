# SPDX-License-Identifier: Apache-2.0
"""docs/reports.md names tests that are there."""

from __future__ import annotations

import pytest

from tests.packaging.pages import is_there, named, rows

REPORTS = rows("reports.md")
TESTS = [(row[0], folder, name) for row in REPORTS for folder, name in named(row[-1])]


@pytest.mark.parametrize(("report", "folder", "name"), TESTS)
def test_a_report_is_covered_by_a_test_that_exists(report: str, folder: str, name: str) -> None:
    assert is_there(folder, name), f"{report}: no test in tests/{folder} is called {name}"


def test_every_report_has_a_row() -> None:
    assert [row[0] for row in REPORTS] == [f"R{number}" for number in range(1, 40)]
