# SPDX-License-Identifier: Apache-2.0
"""c: prefix hits. The whole prompt is cached on D, half of it is, or all of it on P."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.contenders import ESSENTIAL, KVPUSHD, PULL, PUSH, Contender
from benchmarks.engine.pair import Pair
from benchmarks.engine.scenarios.base import (
    D_CLOCK,
    FAST,
    P_CLOCK,
    PREFILL_S,
    PROMPT,
    Findings,
    calibrate,
    never_behind,
)
from benchmarks.engine.stage import Stage
from benchmarks.engine.trial import Ask, Trial, play, prompt
from benchmarks.report.values import goal

_CHUNK = 512
_ANSWER = 16


@dataclass(frozen=True, slots=True)
class _Case:
    """Tokens cached on P and on D before the request; how many requests a turn has, one after another."""

    name: str
    on_p: int
    on_d: int
    requests: int = 1


_CASES = (
    _Case("c full on D", 0, PROMPT, requests=3),
    _Case("c half on D", 0, PROMPT // 2),
    _Case("c full on P", PROMPT, 0),
)


class Prefixes:
    """Plays c's three cases."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """As far as the job wants it."""
        if not stage.job.wants("c"):
            return
        calibrate(stage, findings, "c", 1.0)
        stage.configure(P_CLOCK, D_CLOCK, _CHUNK)
        for case in _CASES:
            self._play(stage, findings, case)

    def _play(self, stage: Stage, findings: Findings, case: _Case) -> None:
        requests = 1 if stage.job.quick else case.requests
        moved = max(0, PROMPT - 1 - case.on_d)

        def turn(pair: Pair, contender: Contender, number: int) -> Trial:
            prompts = [prompt(PROMPT, case.name, contender.name, number, i) for i in range(requests)]
            pair.configure(FAST, FAST)
            for tokens in prompts:
                for engine, count in ((pair.p, case.on_p), (pair.d, case.on_d)):
                    if count:
                        engine.submit(tokens[:count], 1).result(60)
            pair.configure(P_CLOCK, D_CLOCK)
            # Far enough apart for P, which computes each whole prompt whoever needs it.
            spacing = 1.3 * PREFILL_S
            return play(
                pair, contender, [Ask(t, _ANSWER, i * spacing, moved=moved) for i, t in enumerate(prompts)]
            )

        stage.choose(case.name, turn)
        rounds = stage.rounds(case.name, ESSENTIAL, turn)
        findings.rounds.append(rounds)
        findings.goals += never_behind(rounds)
        if case.on_d == PROMPT:
            for other, limit in ((PULL, 3.0), (PUSH, 0.98)):
                ratio = rounds.ratio("ttft_s", other, KVPUSHD)
                findings.goals.append(
                    goal(3, "TTFT, against / kvpushd", ">=", limit, ratio, case.name, other.name)
                )
