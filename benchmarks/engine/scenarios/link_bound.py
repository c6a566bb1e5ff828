# SPDX-License-Identifier: Apache-2.0
"""a: the link takes as long as prefill. a1 prefills in four chunks, a2 in one; a sweep varies the link."""

from __future__ import annotations

from benchmarks.engine.contenders import (
    ALL,
    ESSENTIAL,
    KVPUSHD,
    MOVERS,
    NONE,
    PULL,
    PUSH,
    PUSH_SEQUENTIAL,
    PUSH_SLOWED,
    Contender,
)
from benchmarks.engine.pair import Pair
from benchmarks.engine.scenarios.base import (
    D_CLOCK,
    P_CLOCK,
    PREFILL_S,
    PROMPT,
    Findings,
    calibrate,
    never_behind,
)
from benchmarks.engine.stage import Rounds, Stage
from benchmarks.engine.trial import Ask, Trial, play, prompt
from benchmarks.report.tables import number
from benchmarks.report.values import Lines, Table, goal

CHUNKS = {"a1": PROMPT // 4, "a2": PROMPT}
SWEEP = (0.1, 0.3, 0.6, 1.0, 2.0, 3.0)
_SWEPT = (KVPUSHD, PULL, PUSH)


class LinkBound:
    """Plays a1, a2 and the sweep."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """All of it, as far as the job wants it."""
        for scenario, chunk in CHUNKS.items():
            if stage.job.wants(scenario):
                self._compare(stage, findings, scenario, chunk)
        if stage.job.wants("sweep") and not (stage.job.quick and not stage.job.only):
            self._sweep(stage, findings)

    def _compare(self, stage: Stage, findings: Findings, scenario: str, chunk: int) -> None:
        calibrate(stage, findings, scenario, 1.0)
        stage.configure(P_CLOCK, D_CLOCK, chunk)
        answer = 32 if stage.job.quick else 128

        def turn(pair: Pair, contender: Contender, round_number: int) -> Trial:
            return play(pair, contender, [_ask(scenario, contender, round_number, answer)])

        stage.choose(scenario, turn)
        contenders: tuple[Contender, ...] = ALL
        if stage.job.quick and scenario != "a1":
            contenders = (*ESSENTIAL, NONE)
        if stage.setting_of(PUSH) != PUSH_SLOWED.setting:
            contenders = (*contenders, PUSH_SLOWED)
        rounds = stage.rounds(scenario, contenders, turn)
        after = stage.carriers.nixl_seconds(PROMPT * stage.bytes_per_token, stage.run_bytes)
        findings.facts.append(f"{scenario}: afterwards, {after / PREFILL_S:.2f} of prefill")
        findings.rounds.append(rounds)
        findings.goals += never_behind(rounds)
        findings.facts.append(_noise(rounds))
        findings.goals += [
            goal(
                1, "TTFT, against / kvpushd", ">=", 1.6, rounds.ratio("ttft_s", o, KVPUSHD), scenario, o.name
            )
            for o in (PULL, PUSH)
        ]
        findings.goals += [
            goal(
                2,
                "tail, kvpushd / against",
                "<=",
                limit,
                rounds.ratio("tail_s", KVPUSHD, o),
                scenario,
                o.name,
            )
            for o, limit in ((PULL, 1 / 4), (PUSH, 1 / 3), (PUSH_SEQUENTIAL, 1 / 3))
            if o in contenders
        ]
        slowed = PUSH_SLOWED if PUSH_SLOWED in contenders else PUSH
        findings.goals.append(
            goal(
                10,
                "engine-process CPU per request, kvpushd / push with its thread slowed",
                "<=",
                0.5,
                rounds.ratio("engine_cpu_s", KVPUSHD, slowed),
                scenario,
                slowed.name,
            )
        )
        findings.tables.append(_cpu(rounds, contenders))

    def _sweep(self, stage: Stage, findings: Findings) -> None:
        stage.configure(P_CLOCK, D_CLOCK, CHUNKS["a1"])
        lines: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in _SWEPT}
        for wanted in SWEEP:
            scenario = f"sweep {wanted:g}"
            ratio = calibrate(stage, findings, scenario, wanted)

            def turn(pair: Pair, contender: Contender, number: int, scenario: str = scenario) -> Trial:
                return play(pair, contender, [_ask(scenario, contender, number, 8)])

            rounds = stage.rounds(scenario, _SWEPT, turn, count=3)
            findings.rounds.append(rounds)
            for contender in _SWEPT:
                times = sorted(rounds.values(contender, "ttft_s"))
                lines[contender.name].append((ratio, times[len(times) // 2] / PREFILL_S))
        title = "TTFT by how slow the link is"
        findings.plots.append(Lines("engine-sweep", title, "transfer / prefill", "TTFT / prefill", lines))


def _ask(scenario: str, contender: Contender, number: int, answer: int) -> Ask:
    tokens = prompt(PROMPT, scenario, contender.name, number)
    return Ask(tokens, answer, moved=PROMPT - 1)


def _noise(rounds: Rounds) -> str:
    """How near to 1 goal 5's TPOT can be asked to be: where nothing is transferred, nothing is behind."""
    ratios = [(o.name, rounds.ratio("tpot_s", o, NONE)) for o in MOVERS if o.name in rounds.trials]
    said = ", ".join(f"{name} {r.value:.3f} ({r.low:.3f} – {r.high:.3f})" for name, r in ratios)
    return f"{rounds.scenario}: TPOT, against / no transfer, which is the floor of goal 5's: {said}"


def _cpu(rounds: Rounds, contenders: tuple[Contender, ...]) -> Table:
    """Where the CPU of a request goes: the engines' own part is what they spend without a transfer."""
    floor = _median(rounds.values(NONE, "engine_cpu_s"))
    rows = []
    for contender in contenders:
        engine = _median(rounds.values(contender, "engine_cpu_s"))
        node = _median(rounds.values(contender, "node_cpu_s"))
        rows.append([contender.name, *(number(v * 1e3) for v in (engine, engine - floor, node))])
    header = ["contender", "engines, ms", "beyond no transfer, ms", "daemons and movers, ms"]
    return Table(f"{rounds.scenario}: CPU per request, medians", header, rows)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
