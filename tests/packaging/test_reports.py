# SPDX-License-Identifier: Apache-2.0
"""docs/reports.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (R\d+) \| .* \| (.*) \|$", re.MULTILINE)
CELL = re.compile(r"(\w+): ((?:`[^`]+`(?:, )?)+)")


def rows() -> list[tuple[str, str, str]]:
    """(report, folder, name) for each test that the page names."""
    found = []
    for report, cell in ROW.findall((ROOT / "docs" / "reports.md").read_text()):
        for folder, names in CELL.findall(cell):
            found += [(report, folder, name) for name in re.findall(r"`([^`]+)`", names)]
    return found


@pytest.mark.parametrize(("report", "folder", "name"), rows())
def test_a_report_is_covered_by_a_test_that_exists(report: str, folder: str, name: str) -> None:
    files = list((ROOT / "tests" / folder).glob("test_*.py"))
    assert files, f"{report} names a folder tests/{folder}"
    assert any(name in file.stem or f"def test_{name}" in file.read_text() for file in files), (
        f"{report}: no test in tests/{folder} is called {name}"
    )


def test_every_report_has_a_row() -> None:
    numbers = [int(report[1:]) for report, _ in ROW.findall((ROOT / "docs" / "reports.md").read_text())]
    assert numbers == list(range(1, 40))
