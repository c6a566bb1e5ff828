# SPDX-License-Identifier: Apache-2.0
"""The guards that are known, and what relies on each: the tables beside this file, by the time they take."""

from __future__ import annotations

import tomllib
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


def read(folder: Path = TABLES) -> dict[str, Guard]:
    """All guards by name, in the order of the tables. Raises ValueError where two share a name."""
    guards: list[Guard] = []
    for group in GROUPS:
        for row in tomllib.loads((folder / f"{group}.toml").read_text())["guard"]:
            row |= {"serves": tuple(row["serves"]), "tests": tuple(row["tests"])}
            guards.append(Guard(group=group, **row))
    names = [guard.name for guard in guards]
    if len(set(names)) < len(names):
        raise ValueError(f"guards share a name: {sorted(name for name in names if names.count(name) > 1)}")
    return {guard.name: guard for guard in guards}
