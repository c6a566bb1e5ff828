# SPDX-License-Identifier: Apache-2.0
"""Values as text, and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report.statistics import Summary
from benchmarks.report.values import Goal, Row, Table

_SUFFIXES = (("_bytes_per_s", 1e-6, "MB/s"), ("_per_s", 1.0, "/s"), ("_s", 1e3, "ms"), ("_bytes", 1e-6, "MB"))


def unit_of(measure: str) -> tuple[float, str]:
    """By what a measure's base value is multiplied to be shown, and the unit then; its name says which."""
    for suffix, factor, unit in _SUFFIXES:
        if measure.endswith(suffix):
            return factor, unit
    return 1.0, ""


def number(value: float) -> str:
    """Three figures that matter."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def summaries(title: str, found: Sequence[tuple[str, str, Summary]], note: str = "") -> Table:
    """A table of (contender, measure, summary)."""
    rows = []
    for contender, measure, s in found:
        factor, unit = unit_of(measure)
        values = [number(v * factor) for v in (s.median, s.p95, s.p99)]
        spread = f"{number(s.low * factor)} – {number(s.high * factor)}"
        rows.append([contender, measure, unit, *values, spread, str(s.count)])
    header = ["contender", "measure", "unit", "median", "p95", "p99", "middle half", "n"]
    return Table(title, header, rows, note)


def of_goals(goals: Sequence[Goal]) -> Table:
    """One row per comparison."""
    rows = [
        [
            str(g.id),
            g.measure,
            g.scenario,
            g.contender,
            g.goal,
            number(g.value),
            f"{number(g.low)} – {number(g.high)}",
            "yes" if g.met else "**no**",
        ]
        for g in sorted(goals, key=lambda g: (g.id, g.scenario, g.measure, g.contender))
    ]
    header = ["#", "measure", "scenario", "against", "goal", "measured", "95 % interval", "met"]
    return Table("Goals", header, rows, "`met` is decided at the worse end of the interval.")


def markdown(table: Table) -> str:
    """As Markdown, with its title."""
    lines = [f"### {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines.append("| " + " | ".join(table.header) + " |")
    lines.append("|" + " --- |" * len(table.header))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def plain(table: Table) -> str:
    """For a terminal: columns aligned."""
    cells = [list(table.header), *[list(row) for row in table.rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
    lines = [
        "  ".join(
            text.replace("**", "").ljust(width) for text, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([table.title, lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


def as_json(row: Row) -> dict[str, object]:
    """A raw sample for results.json."""
    return {
        "scenario": row.scenario,
        "contender": row.contender,
        "round": row.round,
        "kind": row.kind,
        **{name: round(value, 9) for name, value in row.values.items()},
    }
