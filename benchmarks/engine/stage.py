# SPDX-License-Identifier: Apache-2.0
"""All pairs of engines of one model, and paired rounds over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.engine.carrier import Carriers
from benchmarks.engine.contenders import Contender, Family, Setting
from benchmarks.engine.pair import Pair, Shape
from benchmarks.engine.trial import Sample
from benchmarks.report.statistics import Ratio, paired_ratio
from benchmarks.report.tables import unit_of
from benchmarks.report.values import Job, Row
from testing import netns
from testing.clockwork.clock import Clock
from testing.clockwork.harness import Harness
from testing.ensemble import Ensemble


class Turn(Protocol):
    """What a contender did in its turn."""

    @property
    def samples(self) -> Sequence[Sample]:
        """Of its requests."""

    def values(self) -> dict[str, float]:
        """Measures of the whole turn."""


Play = Callable[[Pair, Contender, int], Turn]
"""One turn of a contender in a round; the pair is awake and has nothing to do."""

CHOICE_ROUNDS = 2
_CHOICE = 1000
"""Rounds of choices are numbered from here, so that their prompts are their own."""


class Stage(Ensemble):
    """Pairs for each setting, started once."""

    def __init__(
        self,
        job: Job,
        shape: Shape,
        harness: Harness,
        link: netns.Link,
        carriers: Carriers,
        folder: Path,
        settings: Sequence[Setting],
    ) -> None:
        super().__init__()
        self.job = job
        self.shape = shape
        self.link = link
        self.carriers = carriers
        self.rows: list[Row] = []
        self.chosen: list[str] = []
        self._best: dict[Family, Setting] = {
            "kvpushd": Setting("kvpushd"),
            "none": Setting("none"),
            "pull": Setting("pull", slowed=True),
            "push": Setting("push", slowed=True),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._pairs = {setting: Pair(setting, shape, harness, link, folder) for setting in settings}

    def _begin(self) -> None:
        for pair in self._pairs.values():
            self._stack.callback(pair.close)
            pair.launch()
            # One at a time: a spinning thread would make the next one's start a minute's.
            pair.wait_ready()

    @property
    def bytes_per_token(self) -> int:
        """KV of a token, all layers."""
        return self.shape.geometry.bytes_per_token

    @property
    def run_bytes(self) -> int:
        """KV of a block in one layer: what is contiguous."""
        return self.shape.block_size * self.bytes_per_token // self.shape.geometry.layers

    @contextmanager
    def pair(self, contender: Contender) -> Iterator[Pair]:
        """The pair that plays for a contender, awake, and settled afterwards."""
        pair = self._pairs[contender.setting or self._best[contender.family]]
        with pair.awake():
            yield pair
            pair.settle()

    def setting_of(self, contender: Contender) -> Setting:
        """What plays for a contender now."""
        return contender.setting or self._best[contender.family]

    def configure(self, p: Clock, d: Clock, budget: int) -> None:
        """Sets every pair's pretended times and P's chunk."""
        for pair in self._pairs.values():
            with pair.awake():
                pair.configure(p, d, budget)

    def choose(self, scenario: str, play: Play, families: Sequence[Family] = ("pull", "push")) -> None:
        """Finds each family's best setting, in the first scenario of a stage that asks: by the median TTFT of
        a few turns, dispatched as it is fastest. The turns are kept as rows of their own kind; they count for
        no comparison. With one setting each there is nothing to find."""
        if self.chosen or all(sum(s.family == family for s in self._pairs) == 1 for family in families):
            return
        candidates = [
            Contender(str(setting), setting.family, setting.family == "push", setting)
            for setting in self._pairs
            if setting.family in families
        ]
        found: dict[Contender, list[float]] = {candidate: [] for candidate in candidates}
        for number in range(CHOICE_ROUNDS):
            for candidate in candidates:
                trial = self._turn(candidate, play, _CHOICE + number)
                found[candidate].append(trial.values()["ttft_s"])
                self.rows.append(Row(scenario, candidate.name, number, "choice", trial.values()))
        for family in families:
            mine = [candidate for candidate in candidates if candidate.family == family]
            best = min(mine, key=lambda candidate: statistics.median(found[candidate]))
            assert best.setting is not None
            self._best[family] = best.setting
            times = ", ".join(f"{c.name}: {statistics.median(found[c]) * 1e3:.0f} ms" for c in mine)
            self.chosen.append(f"{scenario}: best setting of {family} by TTFT is “{best.name}” ({times})")
            self.job.say(self.chosen[-1])

    def rounds(
        self,
        scenario: str,
        contenders: Sequence[Contender],
        play: Play,
        count: int | None = None,
        told: str = "ttft_s",
    ) -> Rounds:
        """Plays paired rounds: in each, every contender once, in an order that turns round by round.

        `told` is the measure that the progress names. A family that leaves a request without an answer is
        left out, with what it had done before; raises TimeoutError if that is kvpushd.
        """
        found = Rounds(scenario)
        total = self.job.rounds if count is None else count
        silent: set[Family] = set()
        for number in range(total):
            turn = number % len(contenders)
            order = [*contenders[turn:], *contenders[:turn]]
            for contender in order if number % 2 == 0 else reversed(order):
                if contender.family in silent:
                    continue
                try:
                    found.add(contender, number, self._turn(contender, play, number))
                except TimeoutError as error:
                    if contender.family == "kvpushd":
                        raise
                    silent.add(contender.family)
                    why = f"in round {number + 1} {contender.name} left a request without an answer ({error})"
                    self._leave_out(found, [c for c in contenders if c.family == contender.family], why)
            factor, unit = unit_of(told)
            said = [
                f"{c.name} {found.values(c, told)[-1] * factor:.0f}"
                for c in contenders
                if c.family not in silent
            ]
            self.job.say(f"{scenario} {number + 1}/{total}: {told} {unit}: {', '.join(said)}")
        self.rows += found.rows
        return found

    def _leave_out(self, found: Rounds, contenders: Sequence[Contender], why: str) -> None:
        for contender in contenders:
            found.drop(contender)
            self.chosen.append(f"{found.scenario}: {contender.name} is left out: {why}")
            self.job.say(self.chosen[-1])

    def _turn(self, contender: Contender, play: Play, number: int) -> Turn:
        with self.pair(contender) as pair:
            return play(pair, contender, number)


class Rounds:
    """What was measured in paired rounds of one scenario."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.rows: list[Row] = []
        self.trials: dict[str, list[Turn]] = {}

    def add(self, contender: Contender, number: int, trial: Turn) -> None:
        """A contender's turn."""
        self.trials.setdefault(contender.name, []).append(trial)
        self.rows.append(Row(self.scenario, contender.name, number, "trial", trial.values()))
        for sample in trial.samples:
            self.rows.append(Row(self.scenario, contender.name, number, sample.kind, sample.values()))

    def drop(self, contender: Contender) -> None:
        """Forgets a contender's turns."""
        self.trials.pop(contender.name, None)
        self.rows = [row for row in self.rows if row.contender != contender.name]

    def values(self, contender: Contender, measure: str) -> list[float]:
        """A measure of a contender's turns, round by round. Raises KeyError if it has none."""
        return [
            row.values[measure]
            for row in self.rows
            if row.kind == "trial" and row.contender == contender.name
        ]

    def ratio(self, measure: str, above: Contender, below: Contender) -> Ratio:
        """One contender's measure over another's, paired."""
        return paired_ratio(self.values(above, measure), self.values(below, measure))
