# SPDX-License-Identifier: Apache-2.0
"""The control part: how soon, how often, and what of it grows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.control import growth, hops
from benchmarks.control.growth import Kind
from benchmarks.control.pair import Pair
from benchmarks.control.raw import Raw
from benchmarks.report import tables
from benchmarks.report.statistics import paired_difference, paired_ratio, percentile, summary
from benchmarks.report.values import Goal, Job, Outcome, Row, Table, goal
from testing import rank

OPEN = (1, 64, 1_000)
BLOCKS = 2048
CYCLES_PER_S = 500
LATER_S = 1.5e-3
GROWTH = 1.2
_WARM_UP = 30


class ControlPart:
    """Real daemons, movers and client sessions; NIXL over TCP on the loopback; transfers of one block."""

    name = "control"

    def run(self, job: Job) -> Outcome:
        """Raises if a transfer ends badly, or a process."""
        rows: list[Row] = []
        goals: list[Goal] = []
        rounds = _pair_rounds(job)
        if rounds:
            rows += rounds
            goals += _pair_goals(rounds)
        for kind in (growth.RESERVATIONS, growth.PEERS):
            if job.wants(kind.name):
                found = _growth_rounds(job, kind)
                rows += found
                goals += _growth_goals(kind, found)
        return Outcome(rows, goals, _FACTS, _tables(rows))


_FACTS = (
    "UCX_TLS=tcp,self over the loopback for all; one block of "
    f"{rank.LAYERS} layers, {rank.BLOCK * rank.HEADS * rank.CELL} bytes each, a transfer",
    "landing: from the handoff of a block that is reserved and final, until the receiver's client polls its "
    "end; raw: from before a write of as many runs is prepared, until the other process has its "
    "notification, both polling without a pause. kvpushd's processes idle while raw plays, and the other way "
    "round",
    "its hops: until P's daemon knows that the block is final; until it knows that the block has landed; "
    "until D's daemon knows; until D's client has looked",
    "cycles: from reserve to landed, over two daemons, two movers and four client sessions in one process, "
    "which looks each millisecond; on one core, all of these are pinned to it",
    "a landing is three gRPC streams one after the other (client, daemon, daemon, client) around one write, "
    "with a mover's wakeup on either side of it; a cycle on its own is a dozen messages on five streams, "
    "each of which wakes a process: that, not the ledger, is most of its CPU, and falls as open requests "
    "share messages",
    "reservations: met by a handoff and moving nothing. peers: real links, inlets and outlets between two "
    "daemons, where the sending one is dialed under as many addresses of the loopback; its engine is one",
)


def _pair_rounds(job: Job) -> list[Row]:
    rows: list[Row] = []
    wanted = [name for name in ("landing", *_cycle_names()) if job.wants(name)]
    if not wanted:
        return rows
    landings = 60 if job.quick else 150
    with (
        Raw(rank.LAYERS, rank.BLOCK * rank.HEADS * rank.CELL) as raw,
        Pair(_folder(job, "pair"), BLOCKS) as pair,
    ):
        raw.landings(_WARM_UP)
        pair.landings(_WARM_UP)
        for turn in range(job.rounds):
            if "landing" in wanted:
                players = [partial(_lands, pair), partial(_lands_raw, raw)]
                rows += [play(landings, turn) for play in players[:: -1 if turn % 2 else 1]]
            for open_requests in OPEN:
                if f"open {open_requests}" in wanted:
                    rows.append(_cycles(job, pair, open_requests, turn, ""))
                if f"one core, open {open_requests}" in wanted:
                    with pair.one_core():
                        rows.append(_cycles(job, pair, open_requests, turn, "one core, "))
            job.say(f"control: round {turn + 1} of {job.rounds}")
    return rows


def _lands(pair: Pair, count: int, turn: int) -> Row:
    landings = pair.landings(count)
    values = _latencies([landing.seconds for landing in landings])
    for hop, took in hops.medians(landings, *pair.nodes):
        values[f"{hop}, p50_s"] = took
    return Row("landing", "kvpushd", turn, "trial", values)


def _lands_raw(raw: Raw, count: int, turn: int) -> Row:
    return Row("landing", "raw", turn, "trial", _latencies(raw.landings(count)))


def _latencies(took: Sequence[float]) -> dict[str, float]:
    return {"p50_s": percentile(took, 50), "p99_s": percentile(took, 99)}


def _cycle_names() -> list[str]:
    return [f"{where}open {n}" for where in ("", "one core, ") for n in OPEN]


def _cycles(job: Job, pair: Pair, open_requests: int, turn: int, where: str) -> Row:
    count = {1: 60, 64: 600, 1_000: 1_500}[open_requests] * (2 if job.quick else 3) // 3
    found = pair.cycles(open_requests, count)
    values = {
        "cycles_per_s": found.per_second,
        "p50_s": percentile(found.latencies, 50),
        "p99_s": percentile(found.latencies, 99),
        "cpu_s": found.cpu_s / len(found.latencies),
    }
    return Row(f"{where}open {open_requests}", "kvpushd", turn, "trial", values)


def _pair_goals(rows: Sequence[Row]) -> list[Goal]:
    goals = []
    ours, raw = _values(rows, "landing", "p99_s", "kvpushd"), _values(rows, "landing", "p99_s", "raw")
    if ours:
        later = paired_difference(ours, raw)
        goals.append(goal(12, "p99 handoff to landed, later by s", "<=", LATER_S, later, "landing", "raw"))
    for open_requests in OPEN[1:]:
        scenario = f"one core, open {open_requests}"
        rates = _values(rows, scenario, "cycles_per_s")
        if rates:
            ratio = paired_ratio(rates, [1.0] * len(rates))
            goals.append(goal(12, "cycles per second", ">=", CYCLES_PER_S, ratio, scenario, ""))
    return goals


def _growth_rounds(job: Job, kind: Kind) -> list[Row]:
    spans = [kind.early, kind.late]
    if job.quick:
        spans = [(start // 4, end // 4) for start, end in spans]
    rows = []
    for turn in range(1 if job.quick else 3):  # each on fresh nodes: half a minute
        found = growth.measure(kind, spans, _folder(job, f"{kind.name}-{turn}"))
        for (start, end), values in zip(spans, found, strict=True):
            rows.append(Row(kind.name, f"{start} to {end}", turn, "trial", values))
        job.say(f"control: {kind.name}, round {turn + 1}")
    return rows


def _growth_goals(kind: Kind, rows: Sequence[Row]) -> list[Goal]:
    early, late = dict.fromkeys(row.contender for row in rows)
    goals = []
    for measure, what in (("cpu_s", "CPU"), ("memory_bytes", "memory")):
        ratio = paired_ratio(
            _values(rows, kind.name, measure, late), _values(rows, kind.name, measure, early)
        )
        name = f"{what} of one more, {late} / {early}"
        goals.append(goal(13, name, "<=", GROWTH, ratio, kind.name, "itself"))
    return goals


def _values(rows: Sequence[Row], scenario: str, measure: str, contender: str = "kvpushd") -> list[float]:
    return [row.values[measure] for row in rows if (row.scenario, row.contender) == (scenario, contender)]


def _tables(rows: Sequence[Row]) -> list[Table]:
    found = []
    for scenario, contender in dict.fromkeys((row.scenario, row.contender) for row in rows):
        mine = [row for row in rows if (row.scenario, row.contender) == (scenario, contender)]
        for measure in mine[0].values:
            values = summary([row.values[measure] for row in mine])
            found.append((f"{scenario}, {contender}", measure, values))
    return [tables.summaries("control: per round, or per item", found)]


def _folder(job: Job, name: str) -> Path:
    folder = job.folder / name
    folder.mkdir(parents=True)
    return folder
