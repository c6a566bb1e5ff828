# SPDX-License-Identifier: Apache-2.0
"""docs/failures.md names, for each failure, tests that are there."""

from __future__ import annotations

import pytest

from tests.packaging.pages import is_there, named, rows

FAILURES = [(row[0], row[-1]) for row in rows("failures.md")]


@pytest.mark.parametrize(("failure", "cell"), FAILURES)
def test_a_failure_is_shown_by_tests_that_exist(failure: str, cell: str) -> None:
    tests = named(cell)
    assert tests, f"{failure}: names no test"
    assert [f"{folder}: {name}" for folder, name in tests if not is_there(folder, name)] == []


def test_the_page_has_all_of_its_rows() -> None:
    assert len(FAILURES) >= 19
