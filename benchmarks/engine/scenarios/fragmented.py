# SPDX-License-Identifier: Apache-2.0
"""b: fragmented KV. Prompts of 24,576 runs of 4 KiB, in shuffled blocks on both sides, one after another, so
that D decodes earlier ones while later ones arrive. The link is as fast as the machine."""

from __future__ import annotations

from benchmarks.engine.contenders import ESSENTIAL, KVPUSHD, NONE, PULL, Contender
from benchmarks.engine.pair import Pair
from benchmarks.engine.scenarios.base import HOST_S, STEP_S, Findings, never_behind, unshaped
from benchmarks.engine.stage import Stage
from benchmarks.engine.trial import Ask, Trial, play, prompt
from benchmarks.report.values import goal
from testing.clockwork.clock import Clock

_PROMPT = 8192
_PREFILL_S = 0.5
_SPACING_S = 0.65
_CHUNK = 2048


class Fragmented:
    """Plays b."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """As far as the job wants it."""
        if not stage.job.wants("b"):
            return
        unshaped(stage, findings, "b")
        clock = Clock(_PREFILL_S / _PROMPT, STEP_S, HOST_S)
        stage.configure(clock, clock, _CHUNK)
        count, answer = (3, 32) if stage.job.quick else (4, 64)
        findings.facts.append(
            f"b: {count} prompts of {_PROMPT} tokens, {_SPACING_S} s apart, {answer} tokens out; each is "
            f"{_PROMPT // stage.shape.block_size * stage.shape.geometry.layers:,} runs of "
            f"{stage.run_bytes >> 10} KiB in shuffled blocks"
        )

        def turn(pair: Pair, contender: Contender, number: int) -> Trial:
            pair.shuffle(number)
            asks = [
                Ask(
                    prompt(_PROMPT, "b", contender.name, number, i), answer, i * _SPACING_S, moved=_PROMPT - 1
                )
                for i in range(count)
            ]
            return play(pair, contender, asks)

        stage.choose("b", turn)
        rounds = stage.rounds("b", ESSENTIAL if stage.job.quick else (*ESSENTIAL, NONE), turn)
        findings.rounds.append(rounds)
        findings.goals += never_behind(rounds)
        for measure, name, limit in (("ttft_s", "TTFT", 2.0), ("tpot_s", "TPOT", 1.3)):
            ratio = rounds.ratio(measure, PULL, KVPUSHD)
            findings.goals.append(goal(4, f"{name}, against / kvpushd", ">=", limit, ratio, "b", PULL.name))
