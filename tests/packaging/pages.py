# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/ whose tables name tests: read, and held against what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"(\w+): ((?:`[^`]+`(?:, )?)+)")


def rows(page: str) -> list[list[str]]:
    """The cells of each row of a page's table, its head left out."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    table = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in table if set(row[0]) - set(" -")][1:]


def named(cell: str) -> list[tuple[str, str]]:
    """(folder of tests/, name) for each test that a cell names."""
    return [
        (folder, name) for folder, names in CELL.findall(cell) for name in re.findall(r"`([^`]+)`", names)
    ]


def is_there(folder: str, name: str) -> bool:
    """Whether a test is called so, or a file of tests, in the folder, or in the file that has its name."""
    files = [*(ROOT / "tests" / folder).glob("test_*.py"), *(ROOT / "tests").glob(f"test_{folder}.py")]
    return any(file.stem == f"test_{name}" or f"def test_{name}(" in file.read_text() for file in files)
