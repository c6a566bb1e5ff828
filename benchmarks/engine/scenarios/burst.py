# SPDX-License-Identifier: Apache-2.0
"""e: a burst of 150 prompts of 900 tokens, all at once. The link is as fast as the machine.

Blocks are shuffled: engines that have just begun give them out side by side. In two first rounds runs were
70 and 35 KB long, in the third and fourth 20, as the rounds before had left them."""

from __future__ import annotations

from benchmarks.engine.contenders import ESSENTIAL, Contender
from benchmarks.engine.pair import Pair
from benchmarks.engine.scenarios.base import HOST_S, STEP_S, Findings, never_behind, unshaped
from benchmarks.engine.stage import Stage
from benchmarks.engine.trial import Ask, Trial, play, prompt
from testing.clockwork.clock import Clock

_PROMPT = 900
_SECONDS_PER_TOKEN = 20e-6
_CHUNK = 2048


class Burst:
    """Plays e."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """As far as the job wants it."""
        if not stage.job.wants("e"):
            return
        unshaped(stage, findings, "e")
        clock = Clock(_SECONDS_PER_TOKEN, STEP_S, HOST_S)
        stage.configure(clock, clock, _CHUNK)
        count = 40 if stage.job.quick else 150
        findings.facts.append(
            f"e: {count} prompts of {_PROMPT} tokens at once, shuffled blocks, 16 tokens out"
        )

        def turn(pair: Pair, contender: Contender, number: int) -> Trial:
            pair.shuffle(number)
            asks = [
                Ask(prompt(_PROMPT, "e", contender.name, number, i), 16, moved=_PROMPT - 1)
                for i in range(count)
            ]
            return play(pair, contender, asks)

        stage.choose("e", turn)
        rounds = stage.rounds("e", ESSENTIAL, turn)
        findings.rounds.append(rounds)
        findings.goals += never_behind(rounds)
