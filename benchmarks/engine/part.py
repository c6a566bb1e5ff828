# SPDX-License-Identifier: Apache-2.0
"""The engine part: starts everything, plays the scenarios, and says what came of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.engine import contenders
from benchmarks.engine.carrier import Carriers
from benchmarks.engine.contenders import QUICK_SETTINGS, SETTINGS
from benchmarks.engine.pair import Shape
from benchmarks.engine.scenarios.base import Findings, Scenario
from benchmarks.engine.scenarios.burst import Burst
from benchmarks.engine.scenarios.busy import Busy
from benchmarks.engine.scenarios.fragmented import Fragmented
from benchmarks.engine.scenarios.interference import Interference
from benchmarks.engine.scenarios.link_bound import LinkBound
from benchmarks.engine.scenarios.mixed import Mixed
from benchmarks.engine.scenarios.prefixes import Prefixes
from benchmarks.engine.stage import Rounds, Stage
from benchmarks.engine.trial import WrongTokens
from benchmarks.report import tables
from benchmarks.report.statistics import summary
from benchmarks.report.values import Bars, Job, Outcome, Row, Table
from testing import netns
from testing.clockwork import checkpoint
from testing.clockwork.clock import Works
from testing.clockwork.harness import Harness

BLOCK = 16
WIDE = checkpoint.Geometry(layers=24, kv_heads=4, head_dim=128, works=Works(verify="first"))
"""A full-sized model's shape: runs of 32 KiB per block and layer."""
NARROW = checkpoint.Geometry(layers=48, kv_heads=1, head_dim=64, works=Works(verify="first"))
"""One narrow head, as a latent is: runs of 4 KiB."""
_STAGES: tuple[
    tuple[str, checkpoint.Geometry, int, tuple[tuple[type[Scenario], tuple[str, ...]], ...]], ...
] = (
    (
        "wide",
        WIDE,
        960 << 20,
        (
            (LinkBound, ("a1", "a2", "sweep")),
            (Prefixes, ("c",)),
            (Mixed, ("d",)),
            (Interference, ("f",)),
            (Busy, ("g",)),
        ),
    ),
    ("narrow", NARROW, 768 << 20, ((Fragmented, ("b",)), (Burst, ("e",)))),
)
# A quarter of KV space as small as here is less than one summary of 8,000 tokens.
_NODE = {"ucx__tls": "tcp,self", "pinned_share": 0.9}


class EnginePart:
    """Real vLLM engines on two network namespaces."""

    name = "engine"

    def run(self, job: Job) -> Outcome:
        """Raises if an output is wrong, an engine dies, or a contender did not move what it should have."""
        findings = Findings()
        rows: list[Row] = []
        failures: list[str] = []
        findings.facts += [
            "two network namespaces, joined by veth, shaped by tc tbf; UCX_TLS=tcp,self for all, since UCX's "
            "default would go around the link between two namespaces of one host",
            "the engines of vLLM's connectors are stopped (SIGSTOP) while others are measured: their agents' "
            "progress threads spin; kvpushd's engines and daemons run on",
            f"kvpushd's own settings: {', '.join(f'{k} = {v}' for k, v in _NODE.items())}",
            "all processes may use all cores; block size, KV space, clock and link are the same for all",
        ]
        if job.quick:
            findings.facts.append(
                "vLLM's connectors only with slowed threads; a full run tries both settings"
            )
        with (
            netns.Link(f"kvbench{os.getpid()}") as link,
            Carriers(link) as carriers,
            Harness(job.folder / "engines") as harness,
        ):
            for name, geometry, kv_bytes, scenarios in _STAGES:
                if not any(job.wants(scenario) for _, wanted in scenarios for scenario in wanted):
                    continue
                shape = Shape(
                    model=checkpoint.write(job.folder / name, geometry),
                    geometry=geometry,
                    block_size=BLOCK,
                    kv_cache_bytes=kv_bytes,
                    max_model_len=9216,
                    max_num_batched_tokens=8192,
                    node=_NODE,
                )
                findings.facts.append(
                    f"{name} model: {geometry.layers} layers, {geometry.kv_heads} KV heads of "
                    f"{geometry.head_dim}, {geometry.bytes_per_token >> 10} KiB of KV a token, blocks of "
                    f"{BLOCK} tokens, {kv_bytes >> 20} MiB of KV space"
                )
                job.say(f"{name} model: starting the pairs")
                settings = QUICK_SETTINGS if job.quick else SETTINGS
                nodes = job.folder / f"{name}-nodes"
                with Stage(job, shape, harness, link, carriers, nodes, settings) as stage:
                    job.say("all pairs are up")
                    for scenario, _ in scenarios:
                        try:
                            scenario().run(stage, findings)
                        except WrongTokens:
                            raise
                        except (RuntimeError, TimeoutError, ValueError) as error:
                            job.say(f"{scenario.__name__} failed: {error}")
                            first = str(error).splitlines()[0]
                            failures.append(f"{scenario.__name__}: {type(error).__name__}: {first:.300}")
                    rows += stage.rows
                    findings.facts += stage.chosen
        summary_tables = [_measures(rounds) for rounds in findings.rounds]
        plots = [*_bars(findings.rounds), *findings.plots]
        return Outcome(
            rows, findings.goals, findings.facts, [*summary_tables, *findings.tables], plots, failures
        )


_SHOWN = (
    "ttft_s",
    "ttft_p95_s",
    "interactive_ttft_p95_s",
    "tpot_s",
    "stall_s",
    "tail_s",
    "first_tail_s",
    "handover_s",
    "requests_per_s",
    "p_tokens_per_s",
    "engine_cpu_s",
    "node_cpu_s",
)


def _measures(rounds: Rounds) -> Table:
    found = []
    for measure in _SHOWN:
        for name in rounds.trials:
            values = [
                row.values[measure]
                for row in rounds.rows
                if row.kind == "trial" and row.contender == name and measure in row.values
            ]
            if values:
                found.append((name, measure, summary(values)))
    return tables.summaries(f"{rounds.scenario}: per round", found)


def _bars(all_rounds: Sequence[Rounds]) -> list[Bars]:
    shown = [rounds for rounds in all_rounds if not rounds.scenario.startswith("sweep")]
    plots = []
    for measure, title in (
        ("ttft_s", "Time to first token"),
        ("tail_s", "Tail: last byte at P to first token"),
    ):
        series: dict[str, list[tuple[float, float, float] | None]] = {}
        for contender in contenders.ALL:
            bars: list[tuple[float, float, float] | None] = []
            for rounds in shown:
                if contender.name not in rounds.trials or measure not in rounds.rows[0].values:
                    bars.append(None)
                    continue
                s = summary([1e3 * v for v in rounds.values(contender, measure)])
                bars.append((s.median, s.low, s.high))
            series[contender.name] = bars
        labels = [rounds.scenario for rounds in shown]
        if labels:
            plots.append(Bars(f"engine-{measure.removesuffix('_s')}", title, "ms", labels, series))
    return plots
