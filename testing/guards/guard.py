# SPDX-License-Identifier: Apache-2.0
"""The guards that are known, and what relies on each: the tables beside this file, by the time they take."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parent
GROUPS = ("core", "rooms", "node", "vllm")
"""A table each, the quickest first: core takes seconds a guard, vllm half a minute and the whole machine."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A place in the source where something wrong is kept from happening.

    `before` stands in `file` exactly once; with `after` in its place the guard is gone, and each of `tests`
    (pytest's ids, without parameters) must fail.
    """

    group: str
    name: str
    serves: tuple[str, ...]
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def taken_out(self, source: str) -> str:
        """The source without the guard. Raises ValueError where it does not stand there exactly once."""
        found = source.count(self.before)
        if found != 1:
            raise ValueError(f"guard {self.name}: its text stands in {self.file} {found} times, not once")
        return source.replace(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Table:
    """All guards, and why some of what is promised has none."""

    guards: tuple[Guard, ...]
    without: Mapping[str, str]

    def named(self, name: str) -> Guard:
        """The guard of that name. Raises KeyError."""
        return {guard.name: guard for guard in self.guards}[name]


def read(folder: Path = TABLES) -> Table:
    """Reads the tables. Raises ValueError where two guards share a name."""
    guards: list[Guard] = []
    without: dict[str, str] = {}
    for group in GROUPS:
        found = tomllib.loads((folder / f"{group}.toml").read_text())
        without |= found.get("without", {})
        for row in found["guard"]:
            row |= {"serves": tuple(row["serves"]), "tests": tuple(row["tests"])}
            guards.append(Guard(group=group, **row))
    names = [guard.name for guard in guards]
    if len(set(names)) < len(names):
        raise ValueError(f"guards share a name: {sorted(name for name in names if names.count(name) > 1)}")
    return Table(tuple(guards), without)
