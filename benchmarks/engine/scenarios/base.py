# SPDX-License-Identifier: Apache-2.0
"""What scenarios share: the pretended machine, and the goals that hold in every scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.engine.contenders import KVPUSHD, MOVERS, Contender
from benchmarks.engine.stage import Rounds, Stage
from benchmarks.report.values import Bars, Goal, Lines, Table, goal
from testing.clockwork.clock import Clock

PROMPT = 2048
PREFILL_S = 0.6
"""What a prompt of 2,048 tokens computes for. Qwen3-32B on an H200 takes about a quarter of a second and
moves 512 MiB; here it is 96 MiB, over a link that is slower by as much as makes the two comparable."""
STEP_S = 0.015
"""A decode step: the weights of a 32B model read once."""
HOST_S = 0.001
"""Of each step, burnt with the GIL held."""

P_CLOCK = Clock(PREFILL_S / PROMPT, STEP_S, HOST_S)
D_CLOCK = P_CLOCK
FAST = Clock()

NEVER_BEHIND = 0.98
TOLERANCE = 0.1


@dataclass(slots=True)
class Findings:
    """What a scenario adds to the report, besides its rows."""

    goals: list[Goal] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Bars | Lines] = field(default_factory=list)
    rounds: list[Rounds] = field(default_factory=list)


class Scenario(Protocol):
    """Plays its cases as far as the stage's job wants them."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """Adds goals, facts, tables and plots to the findings."""


def calibrate(stage: Stage, findings: Findings, scenario: str, ratio: float) -> float:
    """Shapes the link so that raw NIXL moves a prompt in `ratio` of its prefill; returns what it then is."""
    size = PROMPT * stage.bytes_per_token
    took = stage.carriers.calibrate(size, stage.run_bytes, PREFILL_S * ratio)
    said = (
        f"{scenario}: link at {(stage.link.rate or 0) / 1e6:.0f} MB/s; raw NIXL moves a prompt's "
        f"{size >> 20} MiB in {took * 1e3:.0f} ms, {took / PREFILL_S:.2f} of its prefill"
    )
    if abs(took / PREFILL_S - ratio) > TOLERANCE * max(1.0, ratio):
        said += f" (NOT the {ratio:g} that was wanted: this machine can't, or is busy)"
    findings.facts.append(said)
    stage.job.say(said)
    return took / PREFILL_S


def unshaped(stage: Stage, findings: Findings, scenario: str) -> None:
    """Lets the link go as fast as the machine does."""
    stage.link.shape(None)
    size = PROMPT * stage.bytes_per_token
    took = stage.carriers.nixl_seconds(size, stage.run_bytes)
    findings.facts.append(
        f"{scenario}: link not shaped; raw NIXL moves {size >> 20} MiB in runs of "
        f"{stage.run_bytes >> 10} KiB in {took * 1e3:.0f} ms"
    )


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
                    goal(
                        5,
                        f"{name}, against / kvpushd",
                        ">=",
                        NEVER_BEHIND,
                        ratio,
                        rounds.scenario,
                        other.name,
                    )
                )
    return goals
