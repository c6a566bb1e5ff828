# SPDX-License-Identifier: Apache-2.0
"""The guards that are known, and what relies on each: the tables beside this file, by the time they take."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    """All guards by name, in the order of the tables. Raises ValueError where two share a name.

    A row with `same` is the guard of that name in a table before it, once more and with tests that take
    longer: whatever else the row does not say is as it is there. Raises KeyError where there is none.
    """
    guards: dict[str, Guard] = {}
    for group in GROUPS:
        for row in tomllib.loads((folder / f"{group}.toml").read_text())["guard"]:
            said: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
            }
            same = said.pop("same", None)
            guard = replace(guards[same], group=group, **said) if same else Guard(group=group, **said)
            if guard.name in guards:
                raise ValueError(f"two guards are called {guard.name}")
            guards[guard.name] = guard
    return guards
