# SPDX-License-Identifier: Apache-2.0
"""Writes a run's folder: report.md, results.json and plots; `latest` points at the last one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import plots, tables
from benchmarks.report.values import Goal, Outcome, Row


class Record:
    """A report in the making. Each part is written as soon as it is there: a later one may fail."""

    def __init__(self, folder: Path, machine: Mapping[str, str], rounds: int, quick: bool) -> None:
        self.folder = folder
        self._machine = dict(machine)
        self._rounds = rounds
        self._quick = quick
        self._parts: dict[str, Outcome] = {}
        self._failures: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, outcome: Outcome) -> None:
        """A part is done."""
        self._parts[name] = outcome
        for number, why in enumerate(outcome.failures, 1):
            self._failures[f"{name}, {number}"] = why
        for plot in outcome.plots:
            plots.draw(plot, self.folder)
        self._write()

    def failed(self, name: str, why: str) -> None:
        """A part has no numbers: the report says so."""
        self._failures[name] = why
        self._write()

    @property
    def complete(self) -> bool:
        """Whether nothing failed."""
        return not self._failures

    @property
    def goals(self) -> list[Goal]:
        """All comparisons so far."""
        return [goal for outcome in self._parts.values() for goal in outcome.goals]

    def link(self) -> Path:
        """Makes `latest`, beside the folder, point at it."""
        latest = self.folder.parent / "latest"
        fresh = self.folder.parent / f".latest-{os.getpid()}"
        fresh.symlink_to(self.folder.name)
        fresh.replace(latest)
        return latest

    def _write(self) -> None:
        rows: Sequence[Row] = [row for outcome in self._parts.values() for row in outcome.rows]
        results = {
            "machine": self._machine,
            "rounds": self._rounds,
            "quick": self._quick,
            "failures": self._failures,
            "facts": {name: list(outcome.facts) for name, outcome in self._parts.items()},
            "goals": [asdict(goal) for goal in self.goals],
            "samples": [tables.as_json(row) for row in rows],
        }
        (self.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (self.folder / "report.md").write_text(self._report())

    def _report(self) -> str:
        kind = "quick run" if self._quick else "full run"
        met = sum(goal.met for goal in self.goals)
        lines = [f"# Benchmark, {self.folder.name}", ""]
        lines.append(
            f"A {kind}: {self._rounds} paired rounds, contenders interleaved. {met} of {len(self.goals)} "
            "comparisons met their goal. Raw samples: results.json."
        )
        lines += ["", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in self._machine.items()]
        lines.append("")
        for name, why in self._failures.items():
            lines += [f"**{name} failed**: {why}", ""]
        if self.goals:
            lines.append(tables.markdown(tables.of_goals(self.goals)))
        for name, outcome in self._parts.items():
            lines += [f"## {name.capitalize()}", ""]
            lines += [f"- {fact}" for fact in outcome.facts]
            lines.append("")
            lines += [f"![{plot.title}]({plot.name}.png)\n" for plot in outcome.plots]
            lines += [tables.markdown(table) for table in outcome.tables]
        return "\n".join(lines)
