# SPDX-License-Identifier: Apache-2.0
"""What scenarios share: the pretended machine, and the goals that hold in every scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.engine.contenders import KVPUSHD, MOVERS, Contender
from benchmarks.engine.stage import Rounds
from benchmarks.report.values import Bars, Goal, Lines, Table, goal
from testing.clockwork.clock import Clock

PROMPT = 2048
PREFILL_S = 0.6
"""What a prompt of 2,048 tokens computes for: Qwen3-32B on an H200 takes about a quarter of a second and moves
512 MiB; here it is 96 MiB over a link that is as much slower as makes the two comparable."""
STEP_S = 0.015
"""A decode step: the weights of a 32B model read once."""
HOST_S = 0.001
"""Of each step, burnt with the GIL held."""

P_CLOCK = Clock(PREFILL_S / PROMPT, STEP_S, HOST_S)
D_CLOCK = P_CLOCK
FAST = Clock()

NEVER_BEHIND = 0.98


@dataclass(slots=True)
class Findings:
    """What a scenario adds to the report, besides its rows."""

    goals: list[Goal] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Bars | Lines] = field(default_factory=list)
    rounds: list[Rounds] = field(default_factory=list)


def never_behind(rounds: Rounds, others: Sequence[Contender] = MOVERS) -> list[Goal]:
    """Goal 5, for one scenario."""
    goals = []
    for other in others:
        if other.name not in rounds.trials:
            continue
        for measure, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
            if measure in rounds.rows[0].values:
                ratio = rounds.ratio(measure, other, KVPUSHD)
                goals.append(
                    goal(5, f"{name}, against / kvpushd", ">=", NEVER_BEHIND, ratio, rounds.scenario, other.name)
                )
    return goals
