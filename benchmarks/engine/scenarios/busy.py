# SPDX-License-Identifier: Apache-2.0
"""g: a busy prefiller. Two and four prompts come to P at once: how long the first waits for its KV to reach D
while P computes the next. The link is as fast as the machine, so that it is the waiting that counts."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.engine.contenders import ESSENTIAL, KVPUSHD, PULL, PUSH, Contender
from benchmarks.engine.pair import Pair
from benchmarks.engine.scenarios.base import D_CLOCK, P_CLOCK, PROMPT, Findings, never_behind, unshaped
from benchmarks.engine.stage import Stage
from benchmarks.engine.trial import Ask, Trial, play, prompt
from benchmarks.report.values import goal

_CHUNK = 512
_FIRST = "first_tail_s"


class Busy:
    """Plays g with two and with four prompts."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """As far as the job wants it."""
        if not stage.job.wants("g"):
            return
        unshaped(stage, findings, "g")
        stage.configure(P_CLOCK, D_CLOCK, _CHUNK)
        for count in (2,) if stage.job.quick else (2, 4):
            self._play(stage, findings, f"g{count}", count)

    def _play(self, stage: Stage, findings: Findings, scenario: str, count: int) -> None:
        def turn(pair: Pair, contender: Contender, number: int) -> Trial:
            asks = [
                # A few milliseconds apart, so that it is certain which is the first.
                Ask(prompt(PROMPT, scenario, contender.name, number, i), 16, i * 0.005, moved=PROMPT - 1)
                for i in range(count)
            ]
            trial = play(pair, contender, asks)
            return replace(trial, extra={_FIRST: trial.samples[0].tail})

        stage.choose(scenario, turn)
        rounds = stage.rounds(scenario, ESSENTIAL, turn, told=_FIRST)
        findings.rounds.append(rounds)
        findings.goals += never_behind(rounds)
        for other, limit in ((PULL, 1 / 2), (PUSH, 1 / 5)):
            ratio = rounds.ratio(_FIRST, KVPUSHD, other)
            findings.goals.append(
                goal(14, "tail of the first, kvpushd / against", "<=", limit, ratio, scenario, other.name)
            )
