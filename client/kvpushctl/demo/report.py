# SPDX-License-Identifier: Apache-2.0
"""What the demo found: a table, a verdict, and the reasons for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpushctl.demo.account import PHASES, Account
from kvpushctl.printer import Column, Output, Printer, Record, field
from kvpushctl.units import count, duration_ms, size, yes


@dataclass(frozen=True, slots=True)
class Leaks:
    """What was still held after all had ended."""

    blocks: int
    reservations: int
    handoffs: int

    def __bool__(self) -> bool:
        return bool(self.blocks or self.reservations or self.handoffs)


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    engine: Mapping[str, Any]
    prompts: Sequence[Account]
    leaks: Leaks
    objections: Sequence[str]
    """What else was not as it should be, a line each."""

    @property
    def identical(self) -> bool:
        """Whether every output is the plain engine's."""
        return all(one.output_equal for one in self.prompts)

    def failures(self) -> list[str]:
        """Why the demo failed, a line each; empty if it did not."""
        found = [
            f"{one.about}: its output differs from the plain engine's"
            for one in self.prompts
            if not one.output_equal
        ]
        found += [
            f"{one.about}: {one.recomputed_tokens} positions were recomputed that should have been received"
            + (f" ({one.fault})" if one.fault else "")
            for one in self.prompts
            if one.recomputed_tokens
        ]
        if self.leaks:
            found.append(
                f"still held: {self.leaks.blocks} blocks, {self.leaks.reservations} reservations, "
                f"{self.leaks.handoffs} handoffs"
            )
        return found + list(self.objections)

    def document(self) -> Record:
        """The report as JSON has it."""
        return {
            "verdict": "identical" if self.identical else "different",
            "engine": dict(self.engine),
            "prompts": [dict(one.record()) for one in self.prompts],
            "leaks": {
                "blocks": self.leaks.blocks,
                "reservations": self.leaks.reservations,
                "handoffs": self.leaks.handoffs,
            },
        }


def _phase(name: str) -> Column:
    title = name.replace("_", " ").upper()
    return Column(title, lambda one: duration_ms(one["phases_ms"].get(name)), right=True)


COLUMNS: tuple[Column, ...] = (
    field("PROMPT", "about"),
    field("TOKENS", "prompt_tokens", count, right=True),
    field("EQUAL", "output_equal", yes),
    field("HAD", "local_tokens", count, right=True),
    field("RECEIVED", "external_tokens", count, right=True),
    field("OWN", "own_tokens", count, right=True),
    field("RECOMPUTED", "recomputed_tokens", count, right=True),
    field("PUSHED", "bytes_pushed", size, right=True),
    Column("CHUNKS EARLY", lambda one: f"{one['chunks_before_seal']} of {one['chunks']}", right=True),
    *(_phase(name) for name in PHASES),
)


def show(report: Report, out: Printer) -> None:
    """The table with its verdict on stdout, or the JSON document; reasons go to stderr."""
    if out.output is Output.JSON:
        out.document(report.document())
    else:
        out.print(out.table([one.record() for one in report.prompts], COLUMNS))
        out.print(_verdict(report))
    for line in report.failures():
        out.note(f"not well: {line}")


def _verdict(report: Report) -> str:
    prompts = report.prompts
    equal = sum(one.output_equal for one in prompts)
    received = sum(one.external_tokens for one in prompts)
    pushed = size(sum(one.bytes_pushed for one in prompts))
    early, chunks = sum(one.chunks_before_seal for one in prompts), sum(one.chunks for one in prompts)
    return (
        f"{'identical' if report.identical else 'DIFFERENT'}: "
        f"{equal} of {len(prompts)} outputs are the plain engine's; "
        f"{received:,} positions ({pushed}) were received, "
        f"{sum(one.recomputed_tokens for one in prompts):,} recomputed; "
        f"{early} of {chunks} chunks had landed before prefill ended"
    )
