# SPDX-License-Identifier: Apache-2.0
"""The wire part: plays the cases, and says what came of it."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence

from benchmarks.cpu import cpu_seconds
from benchmarks.report.statistics import Ratio, paired_ratio, summary
from benchmarks.report.values import Bars, Goal, Job, Outcome, Row, Table, goal
from benchmarks.wire import case as cases
from benchmarks.wire import upkeep
from benchmarks.wire.case import POOL_BYTES, RUNS, TRANSPORTS, Case
from benchmarks.wire.contender import Contender
from benchmarks.wire.memory import Memory
from benchmarks.wire.mooncake import Mooncake, Unavailable
from benchmarks.wire.movers import Movers
from benchmarks.wire.nixl import SETTINGS, UNMERGED, Nixl, RawNixl, Setting
from benchmarks.wire.plain import Memcpy, Socket

BEST, PLAIN, CHEAP = "raw NIXL, best", "raw NIXL, unmerged", "raw NIXL, cheapest"
KEEPS = 0.95
"""Of the best bandwidth: what the cheapest setting has to keep."""
Values = dict[str, list[float]]


class WirePart:
    """Movers, raw NIXL, Mooncake and floors, over TCP and CMA, on one host."""

    name = "wire"

    def run(self, job: Job) -> Outcome:
        """Raises WrongBytes where a target does not hold what was sent."""
        tally = _Tally(job)
        with contextlib.ExitStack() as stack:

            def begun(contender: Contender) -> Contender:
                stack.callback(contender.close)
                return contender

            memory = Memory()
            stack.callback(memory.close)
            floors = [begun(Socket(memory, job.folder)), begun(Memcpy(memory))]
            try:
                mooncake = [begun(Mooncake(memory, job.folder, job.say))]
            except Unavailable as error:
                tally.facts.append(f"Mooncake is left out: {error}")
                mooncake = []
            for transport in TRANSPORTS:
                nixl = Nixl(memory, transport, job.folder)
                stack.callback(nixl.close)
                movers = begun(Movers(memory, transport))
                others = [*floors, *mooncake] if transport == "tcp" else floors[1:]
                for case in cases.every(job.quick):
                    if case.transport == transport and job.wants(case.name):
                        tally.play(case, nixl, movers, others)
        goals, table = tally.goals(), tally.table()
        kept = upkeep.measure(job)
        return Outcome(
            [*tally.rows, *kept.rows],
            [*goals, *kept.goals],
            [*tally.setup(), *tally.facts, kept.fact],
            [table, kept.table],
            tally.plots(),
        )


class _Tally:
    """All turns of all cases."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._speeds: dict[Case, Values] = {}
        self._costs: dict[Case, Values] = {}
        self._chosen: dict[Case, dict[str, Setting]] = {}
        self.rows: list[Row] = []
        self.facts: list[str] = []

    def play(self, case: Case, nixl: Nixl, movers: Contender, others: Sequence[Contender]) -> None:
        """Chooses raw NIXL's settings, then plays paired rounds."""
        chosen = self._choose(case, nixl)
        self._chosen[case] = chosen
        # One turn stands for two contenders that are set alike.
        raw = [RawNixl(name, nixl, setting) for name, setting in chosen.items()]
        if chosen[CHEAP] == chosen[BEST]:
            raw = [each for each in raw if each.name != CHEAP]
        contenders: list[Contender] = [movers, *raw, *others]
        self._speeds[case] = {each.name: [] for each in contenders}
        self._costs[case] = {each.name: [] for each in contenders}
        for each in contenders:
            each.turn(case)
            each.check(case)
        for count in range(self._job.rounds):
            turn = count % len(contenders)
            order = [*contenders[turn:], *contenders[:turn]]
            for each in order if count % 2 == 0 else reversed(order):
                speed, cost = _measured(each, case)
                self._speeds[case][each.name].append(speed)
                self._costs[case][each.name].append(cost)
                self._row(case, each.name, count, "trial", speed, cost)
        if chosen[CHEAP] == chosen[BEST]:
            for values in (self._speeds[case], self._costs[case]):
                values[CHEAP] = values[BEST]
        said = ", ".join(f"{name} {statistics.median(v) / 1e9:.2f}" for name, v in self._speeds[case].items())
        self._job.say(f"{case.name}: GB/s: {said}")

    def _choose(self, case: Case, nixl: Nixl) -> dict[str, Setting]:
        """By each setting's median of a few turns: the fastest, the fastest unmerged, and the one that takes
        the least CPU of those that keep the bandwidth."""
        found: dict[Setting, tuple[list[float], list[float]]] = {s: ([], []) for s in (*SETTINGS, *UNMERGED)}
        for count in range(1 if self._job.quick else 2):
            for each, (speeds, costs) in found.items():
                speed, cost = _measured(RawNixl(str(each), nixl, each), case)
                speeds.append(speed)
                costs.append(cost)
                self._row(case, str(each), count, "choice", speed, cost)
        speed_of = {each: statistics.median(speeds) for each, (speeds, _) in found.items()}
        cost_of = {each: statistics.median(costs) for each, (_, costs) in found.items()}
        best = max(SETTINGS, key=speed_of.__getitem__)
        fit = [each for each in SETTINGS if speed_of[each] >= KEEPS * speed_of[best]]
        return {
            BEST: best,
            PLAIN: max(UNMERGED, key=speed_of.__getitem__),
            CHEAP: min(fit, key=cost_of.__getitem__),
        }

    def _row(self, case: Case, name: str, count: int, kind: str, speed: float, cost: float) -> None:
        values = {"bytes_per_s": speed, "cpu_s_per_gb": cost}
        self.rows.append(Row(case.name, name, count, kind, values))

    def goals(self) -> list[Goal]:
        """Of each transport, over all cases that a goal speaks of: round by round, the geometric mean."""
        found = []
        for transport in TRANSPORTS:
            mine = [case for case in self._speeds if case.transport == transport]
            large = [case for case in mine if case.large]
            small = [case for case in mine if case.shape == "mergeable" and case.run == RUNS[0]]
            if large:
                ratio = _pooled(self._speeds, large, BEST)
                found.append(goal(8, "bytes/s", ">=", 0.95, ratio, f"{transport}, runs >= 64 KiB", BEST))
            if small:
                for against, limit in ((PLAIN, 3.0), (BEST, 0.95)):
                    ratio = _pooled(self._speeds, small, against)
                    scenario = f"{transport}, mergeable runs of 4 KiB"
                    found.append(goal(9, "bytes/s", ">=", limit, ratio, scenario, against))
            if mine:
                ratio = _pooled(self._costs, mine, CHEAP)
                found.append(goal(11, "CPU per GB", "<=", 1.1, ratio, f"{transport}, all runs", CHEAP))
        return found

    def setup(self) -> list[str]:
        """How it was set up, and what was chosen."""
        facts = [
            f"two processes of one host; each turn moves {POOL_BYTES >> 20} MiB from and to the same memory, "
            "whoever moves it; TCP is loopback; what is in the target is checked byte by byte in a turn "
            "before the rounds",
            "kvpushd: two mover processes, writes cut and kept in flight by its core's pace; CPU is of both "
            "movers and of the process that stands in for the daemons",
            "raw NIXL: both ends poll from their only thread, without its progress thread; CPU is of both",
            "Mooncake: TCP, batch_transfer_sync_write in batches of 1,024, which is what its queue takes",
            f"“{CHEAP}” is the setting that takes the least CPU per GB of those with {KEEPS:.0%} of the "
            "best's bytes/s; it may be the best itself, which then counts for both",
        ]
        for case, chosen in self._chosen.items():
            facts.append(
                f"{case.name}: " + "; ".join(f"{name}: {setting}" for name, setting in chosen.items())
            )
        return facts

    def table(self) -> Table:
        """Medians of all."""
        names = list(dict.fromkeys(name for values in self._speeds.values() for name in values))
        rows = []
        for case, speeds in self._speeds.items():
            row = [case.name]
            for name in names:
                if name not in speeds:
                    row.append("–")
                    continue
                speed, cost = statistics.median(speeds[name]), statistics.median(self._costs[case][name])
                row.append(f"{speed / 1e9:.2f} · {cost:.2f}")
            rows.append(row)
        return Table("Wire: GB/s · CPU seconds per GB", ["case", *names], rows)

    def plots(self) -> list[Bars]:
        """Bytes per second of each transport's mergeable and fragmented runs."""
        plots = []
        for transport in TRANSPORTS:
            shown = [c for c in self._speeds if c.transport == transport and c.shape != "contiguous"]
            if not shown:
                continue
            names = list(dict.fromkeys(name for case in shown for name in self._speeds[case]))
            series: dict[str, list[tuple[float, float, float] | None]] = {}
            for name in names:
                found = [summary([v / 1e9 for v in self._speeds[case][name]]) for case in shown]
                series[name] = [(s.median, s.low, s.high) for s in found]
            labels = [f"{case.shape} {case.run >> 10}K" for case in shown]
            plots.append(
                Bars(f"wire-{transport}", f"Bytes per second over {transport}", "GB/s", labels, series)
            )
        return plots


def _measured(contender: Contender, case: Case) -> tuple[float, float]:
    """Bytes per second, and CPU seconds per GB."""
    before = cpu_seconds(contender.pids)
    seconds = contender.turn(case)
    return POOL_BYTES / seconds, (cpu_seconds(contender.pids) - before) / POOL_BYTES * 1e9


def _pooled(values: dict[Case, Values], of: Sequence[Case], against: str) -> Ratio:
    """kvpushd's over another's: in each round the geometric mean over the cases."""
    rounds = range(len(values[of[0]][Movers.name]))

    def mean(name: str, count: int) -> float:
        return math.exp(statistics.fmean(math.log(values[case][name][count]) for case in of))

    return paired_ratio([mean(Movers.name, i) for i in rounds], [mean(against, i) for i in rounds])
