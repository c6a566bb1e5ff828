# SPDX-License-Identifier: Apache-2.0
"""What a rule says: at which point, the how manieth time, what goes wrong."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any


class Act(StrEnum):
    """What goes wrong.

    A message: it is lost, late with all behind it, doubled, swapped with the next one; the stream breaks, or
    stands still. A call: it is not made (or, after it, its answer is lost), late, made twice; it fails, or
    does not return. `hang` lasts until its rule is taken away; `exit` ends the process at once.
    """

    DROP = "drop"
    DELAY = "delay"
    REPEAT = "repeat"
    REORDER = "reorder"
    FAIL = "fail"
    HANG = "hang"
    EXIT = "exit"


WHENS = ("before", "after")


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault. `point` and `node` may be patterns; `process` and `node` None = any.

    `nth`: it begins with the nth time that a process comes by, 1 = the first since the rule was set. `times`:
    how often it happens in all processes together, also in those that a fault has ended and that were started
    again; None = for ever. `seconds` is how long a delay takes.
    """

    point: str
    act: Act
    when: str = "before"
    nth: int = 1
    times: int | None = 1
    seconds: float = 0.0
    process: str | None = None
    node: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    def __post_init__(self) -> None:
        object.__setattr__(self, "act", Act(self.act))
        if self.when not in WHENS:
            raise ValueError(f"when is {self.when!r}: expected one of {WHENS}")
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError(f"nth {self.nth} and times {self.times} count from 1")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Rule:
        """A rule as the board's file has it."""
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """The same, back."""
        return asdict(self)

    def is_for(self, process: str, node: str) -> bool:
        """Whether it is meant for a process."""
        return self.process in (None, process) and (self.node is None or fnmatchcase(node, self.node))

    def is_at(self, point: str, when: str) -> bool:
        """Whether it is meant for a point."""
        return self.when == when and fnmatchcase(point, self.point)


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule that has struck. `time` as time.time() has it; `rule` is the rule's id."""

    point: str
    when: str
    act: Act
    pid: int
    process: str
    node: str
    time: float
    rule: str

    def to_json(self) -> dict[str, Any]:
        """As a line of the board's record."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Firing:
        """The same, back."""
        return cls(**{**fields, "act": Act(fields["act"])})
