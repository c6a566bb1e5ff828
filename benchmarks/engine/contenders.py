# SPDX-License-Identifier: Apache-2.0
"""Who is compared with whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["kvpushd", "pull", "push", "none"]
"""How KV moves between a pair of engines. none: one engine does both, the floor."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A family as a pair of engines is started. `slowed`: NIXL's progress thread polls each millisecond."""

    family: Family
    slowed: bool = False

    def __str__(self) -> str:
        if self.family in ("kvpushd", "none"):
            return self.family
        return f"{self.family}, {'thread slowed' if self.slowed else 'as shipped'}"


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the report. concurrent: both legs of a request are dispatched at once.

    `setting` is fixed, or None for the family's best in the scenario.
    """

    name: str
    family: Family
    concurrent: bool = False
    setting: Setting | None = None


KVPUSHD = Contender("kvpushd", "kvpushd", concurrent=True)
KVPUSHD_SEQUENTIAL = Contender("kvpushd, sequential", "kvpushd")
PULL = Contender("pull", "pull")
PUSH = Contender("push", "push", concurrent=True)
PUSH_SEQUENTIAL = Contender("push, sequential", "push")
NONE = Contender("no transfer", "none")
PUSH_SLOWED = Contender("push, thread slowed", "push", concurrent=True, setting=Setting("push", slowed=True))

ALL = (KVPUSHD, PULL, PUSH, KVPUSHD_SEQUENTIAL, PUSH_SEQUENTIAL, NONE)
ESSENTIAL = (KVPUSHD, PULL, PUSH)
"""Those of scenarios in which it is not the dispatch that counts."""
MOVERS = (PULL, PUSH, PUSH_SEQUENTIAL)
"""Those that move KV, besides kvpushd."""

SETTINGS = (
    Setting("kvpushd"),
    Setting("pull"),
    Setting("pull", slowed=True),
    Setting("push"),
    Setting("push", slowed=True),
    Setting("none"),
)
QUICK_SETTINGS = tuple(s for s in SETTINGS if s.slowed or s.family in ("kvpushd", "none"))
"""Without those that were the slower ones wherever they were measured on a machine of few cores."""
