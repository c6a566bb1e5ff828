# SPDX-License-Identifier: Apache-2.0
"""What a part of the benchmark hands over. A part is run once per report; see `Part`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from benchmarks.report.statistics import Ratio


@dataclass(frozen=True, slots=True)
class Row:
    """A raw sample: what one contender did in one round of a scenario.

    `kind` tells rows of a scenario apart ("trial" for one contender's turn, "request" for a request in it).
    `values` are in base units, which their names end with: ttft_s, cpu_s, bytes_per_s; a ratio has none.
    """

    scenario: str
    contender: str
    round: int
    kind: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """One comparison with a goal. `id` is its number, `value` what was measured with its 95 % interval.

    `met` was decided at the worse end of the interval.
    """

    id: int
    measure: str
    goal: str
    value: float
    low: float
    high: float
    met: bool
    scenario: str
    contender: str


@dataclass(frozen=True, slots=True)
class Table:
    """For the report: a title, a header, and rows of text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A plot for the report: one group of bars per label, one bar per series, with an interval for each.

    `series` maps a contender to (value, low, high) per label; a missing bar is None.
    """

    name: str
    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[tuple[float, float, float] | None]]


@dataclass(frozen=True, slots=True)
class Lines:
    """A plot for the report: lines of (x, y) points; x is logarithmic if `log`."""

    name: str
    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a part gives to the report. `facts` says how it was set up, a line each.

    `failures` says which of its scenarios gave no numbers, and why.
    """

    rows: Sequence[Row]
    goals: Sequence[Goal]
    facts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Bars | Lines] = ()
    failures: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What a part is asked for.

    rounds      paired rounds per comparison
    quick       the short run: fewer and smaller cases, the same contenders
    only        scenarios to run, empty = all
    folder      where a part may keep files of its run
    say         prints a line of progress
    """

    rounds: int
    quick: bool
    only: frozenset[str]
    folder: Path
    say: Callable[[str], None]

    def wants(self, scenario: str) -> bool:
        """Whether this scenario is to be run."""
        return not self.only or scenario in self.only


class Part(Protocol):
    """A part of the benchmark: wire, control, engine."""

    name: str

    def run(self, job: Job) -> Outcome:
        """Measures. Raises whatever makes its numbers worthless, a wrong byte first of all."""


Bound = Literal[">=", "<="]


def goal(
    number: int, measure: str, bound: Bound, limit: float, ratio: Ratio, scenario: str, contender: str
) -> Goal:
    """A comparison whose `ratio` is to be at least, or at most, `limit`."""
    worst, holds = (ratio.low, operator.ge) if bound == ">=" else (ratio.high, operator.le)
    return Goal(
        number,
        measure,
        f"{bound} {limit:g}",
        ratio.value,
        ratio.low,
        ratio.high,
        bool(holds(worst, limit)),
        scenario,
        contender,
    )
