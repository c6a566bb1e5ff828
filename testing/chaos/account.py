# SPDX-License-Identifier: Apache-2.0
"""What became of each scenario, and of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from testing.chaos.hearing import VISIBLE, hearing_of, spares
from testing.chaos.scenario import GIVEN_UP, UNANSWERED, Scenario
from testing.chaos.stage import D

PATIENCE = 1.0
"""Seconds that a request may take to end after its lease."""
REGISTERED = 2.0
"""Seconds after a daemon is ready within which living engines are registered again."""
AGAIN = 2.0
"""Seconds after all is up again within which a clean transfer has moved."""
REPLACED = 1.0
"""Seconds within which a dead mover is replaced, its pools mapped."""
UNDISTURBED = 0.95
"""Of its throughput that a peer keeps at the least, whatever happens to another one."""
_TIMEOUT = f"{TimeoutError.__name__}: "


_MEASURED = (
    "said",
    "heard",
    "quarantine",
    "registered",
    "registered_from_start",
    "replaced",
    "undisturbed",
    "again",
    "took",
    "starved",
)
_COLUMNS = ("name", "promise", "worst", "measured")


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended, seconds after the fault or after it was sent, whichever was later."""

    engine: str
    seconds: float
    how: str
    external: int = 0


@dataclass(slots=True)
class Played:
    """A scenario as it went. Times in seconds; None = not measured, since it was not the case."""

    scenario: Scenario
    fired: list[str] = field(default_factory=list)
    bytes: int = 0
    writes: int = 0
    ends: list[End] = field(default_factory=list)
    said: float | None = None
    """Until the nodes that have to hear of the fault list the transfer's end."""
    heard: float | None = None
    """Until their engines have heard of it."""
    quarantine: float | None = None
    registered: float | None = None
    """After the daemon was ready."""
    registered_from_start: float | None = None
    """After its process was started."""
    replaced: float | None = None
    undisturbed: float | None = None
    again: float | None = None
    took: float = 0.0
    starved: float = 0.0
    """Of that, when the machine let nobody run: no promise counts it."""
    deaths: list[str] = field(default_factory=list)
    """Who ended and was not hit."""
    leftovers: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    repeats: list[Played] = field(default_factory=list)
    """Other looks at the same scenario. Their throughput is in `undisturbed`; all else is held against it."""

    @property
    def looks(self) -> list[Played]:
        """This one and its repeats."""
        return [self, *self.repeats]

    def judge(self, lease: float) -> list[str]:
        """What is wrong with it; nothing = as promised."""
        wrong = list(self.troubles)
        if len(self.fired) < len(self.scenario.faults):
            wrong.append(f"{len(self.fired)} of {len(self.scenario.faults)} faults fired")
        wrong += [
            f"a request of {end.engine} ended {end.seconds:.1f} s after the fault" for end in self.late(lease)
        ]
        wrong += [f"{name} died" for name in self.deaths]
        wrong += self.leftovers + self._promises()
        return wrong + [f"repeat {n}: {one}" for n, o in enumerate(self.repeats, 2) for one in o.judge(lease)]

    def _promises(self) -> list[str]:
        wrong = []
        hearing = hearing_of(self.scenario)
        due = hearing.seconds if hearing is not None else VISIBLE
        for what, found, most in (
            ("the other side heard", self.said, due),
            ("its engine heard", self.heard, due),
            ("engines were registered again", self.registered, REGISTERED),
            ("the mover was replaced", self.replaced, REPLACED),
            ("a clean transfer moved", self.again, AGAIN),
        ):
            if found is not None and found - self.starved > most and self.scenario.timed:
                wrong.append(f"{what} after {found:.2f} s, not {most:g}")
        if spares(self.scenario) and not any(end.external for end in self.ends):
            wrong.append("no KV came, though nothing kept it")
        if self.undisturbed is not None and self.undisturbed < UNDISTURBED:
            wrong.append(f"a third node's transfers kept {self.undisturbed:.3f} of their throughput")
        return wrong

    def late(self, lease: float) -> list[End]:
        """Requests that took longer than their lease, or than an engine, or the daemon beside it, that stands
        still is waited for."""
        most = max(lease, self.scenario.silence)
        return [e for e in self.ends if e.seconds - self.starved > max(most, self.deafness(e)) + PATIENCE]

    def deafness(self, end: End) -> float:
        """Seconds for which a request's engine may have waited for its daemon, that stood still."""
        return self.scenario.deafness("d" if end.engine == D else "p")

    def shows_nothing(self, lease: float, silence: float) -> bool:
        """Whether all that is wrong may be the machine's doing, which let nobody run for so long that one who
        is silent counts as dead.

        What was left behind, a wrong answer, an engine's or a daemon's death never is: of
        troubles only that a time ran out.
        """
        sure = [
            *(name for one in self.looks for name in one.deaths if "mover" not in name),
            *(trouble for one in self.looks for trouble in one.troubles if not trouble.startswith(_TIMEOUT)),
            *(left for one in self.looks for left in one.leftovers),
        ]
        return self.starved >= silence and bool(self.judge(lease)) and not sure

    def record(self, lease: float) -> dict[str, Any]:
        """For the report."""
        return {
            "name": self.scenario.name,
            "fired": self.fired,
            "bytes_before": self.bytes,
            "writes": self.writes,
            "ends": [
                {"engine": e.engine, "seconds": round(e.seconds, 3), "how": e.how, "external": e.external}
                for e in self.ends
            ],
            **{
                name: None if (value := getattr(self, name)) is None else round(value, 3)
                for name in _MEASURED
            },
            "wrong": self.judge(lease),
            "repeats": [one.record(lease) for one in self.repeats],
        }


@dataclass(slots=True)
class Account:
    """All that was played."""

    seed: int
    lease: float
    played: list[Played] = field(default_factory=list)
    transfers: int = 0
    bytes: int = 0
    wrong_bytes: int = 0
    in_vain: list[Played] = field(default_factory=list)
    """Plays that show nothing, and were followed by others of the same scenario."""

    def plays_in_vain(self, scenario: Scenario) -> int:
        """How many such there were of a scenario."""
        return sum(one.scenario == scenario for one in self.in_vain)

    def last_line(self) -> dict[str, Any]:
        """The summary that a run prints last."""
        fired: Counter[str] = Counter()
        for one in self.played:
            fired[one.scenario.phase.value] += len(one.fired)
        looks = [look for one in self.played for look in one.looks]
        return {
            "scenarios": len(self.played),
            "seed": self.seed,
            "transfers": self.transfers,
            "bytes": self.bytes,
            "faults_fired_by_phase": dict(sorted(fired.items())),
            "wrong_bytes": self.wrong_bytes,
            "engine_deaths": sum(len(one.deaths) for one in looks),
            "leftovers": sum(len(one.leftovers) for one in looks),
            "late_ends": sum(len(one.late(self.lease)) for one in looks),
            "longest_end_s": round(max((e.seconds for one in looks for e in one.ends), default=0.0), 3),
            "failed": [
                {"scenario": one.scenario.name, "wrong": wrong}
                for one in self.played
                if (wrong := one.judge(self.lease))
            ],
        }

    @property
    def well(self) -> bool:
        """Nothing is wrong with any of it."""
        last = self.last_line()
        return not last["failed"] and not last["wrong_bytes"]

    def figures(self) -> list[tuple[str, str, str, str]]:
        """What was measured: name, promise, worst, how often."""
        rows: list[tuple[str, str, str, str]] = []
        timed = [one for one in self.played if one.scenario.timed]

        def row(name: str, promise: str, found: Sequence[float | None], worst: Any = max) -> None:
            values = [value for value in found if value is not None]
            told = f"{worst(values):.3f}" if values else "not measured"
            rows.append((name, promise, told, str(len(values))))

        brisk, silent = (
            [
                end.seconds
                for one in self.played
                if bool(one.scenario.silence) is still
                for end in one.ends
                if not one.deafness(end)
            ]
            for still in (False, True)
        )
        deaf = [end.seconds for one in self.played for end in one.ends if one.deafness(end)]
        row("longest end of a request, s after the fault", f"{self.lease + PATIENCE:g}", brisk)
        row("the same, where its own daemon stood still", f"{UNANSWERED + PATIENCE:g}", deaf)
        row("the same, where an engine stood still", f"{GIVEN_UP + PATIENCE:g}", silent)
        row("longest quarantine, s after the fault", "counted", [one.quarantine for one in self.played])
        at_once = [one for one in timed if (hearing := hearing_of(one.scenario)) and hearing.at_once]
        later = [one for one in timed if one not in at_once]
        row("the other side heard of a death, s", f"{VISIBLE:g}", [one.said for one in at_once])
        row("its engine heard, s", f"{VISIBLE:g}", [one.heard for one in at_once])
        row("the same, where only silence or a drain's end tells, s", "more", [one.heard for one in later])
        row(
            "registered again, s after the daemon was ready", f"{REGISTERED:g}", [o.registered for o in timed]
        )
        row("the same, s after its process was started", "", [one.registered_from_start for one in timed])
        row("mover replaced, s", f"{REPLACED:g}", [one.replaced for one in timed])
        row(
            "a third node's throughput, of before",
            f"{UNDISTURBED:g}",
            [one.undisturbed for one in self.played],
            min,
        )
        row("a clean transfer moved, s after all was up again", f"{AGAIN:g}", [one.again for one in timed])
        rest = [one.again for one in self.played if not one.scenario.timed]
        row("the same, where no time is promised", "", rest)
        starved = [one.starved for one in self.played if one.starved]
        row("the machine let nobody run, s: not counted above", "", starved)
        vain = [one.starved for one in self.in_vain]
        row("the same in plays that were played again", "", vain)
        return rows

    def markdown(self) -> str:
        """The report for people."""
        last = self.last_line()
        lines = [
            "# Chaos",
            "",
            f"Seed {self.seed}, {last['scenarios']} scenarios, lease {self.lease:g} s.",
            "",
        ]
        lines += [f"- {name}: {last[name]}" for name in last if name != "failed"]
        lines += ["", "| figure | promise | worst | measured |", "| --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(row)} |" for row in self.figures()]
        lines += ["", "| hit | scenarios | failed |", "| --- | --- | --- |"]
        hit: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for one in self.played:
            for fault in one.scenario.faults:
                hit[str(fault)] += 1
                failed[str(fault)] += bool(one.judge(self.lease))
        lines += [f"| {name} | {count} | {failed[name]} |" for name, count in sorted(hit.items())]
        lines += ["", "## Failed", ""]
        lines += [f"- {one['scenario']}: {'; '.join(one['wrong'])}" for one in last["failed"]] or ["None."]
        return "\n".join(lines) + "\n"

    def record(self) -> Mapping[str, Any]:
        """The report for programs."""
        return {
            **self.last_line(),
            "figures": [dict(zip(_COLUMNS, row, strict=True)) for row in self.figures()],
            "played": [one.record(self.lease) for one in self.played],
            "in_vain": [one.record(self.lease) for one in self.in_vain],
        }
