# SPDX-License-Identifier: Apache-2.0
"""The one way out: data on stdout, as tables or as JSON; all else on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

WIDEST = 10_000
"""Columns of a line where there is no terminal to say."""

Record = Mapping[str, Any]
"""Facts under their JSON names; a name ends in its unit (`_bytes`, `_ms`, `_unix_ns`) where it has one."""


class Output(StrEnum):
    """The form of the data."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and a record's cell in it."""

    title: str
    cell: Callable[[Any], str]
    right: bool = False


def field(title: str, key: str, form: Callable[[Any], str] = str, *, right: bool = False) -> Column:
    """The column of one fact, `-` where it is empty."""

    def cell(record: Record) -> str:
        value = record[key]
        return "-" if value is None or value == "" else form(value)

    return Column(title, cell, right)


class Printer:
    """Writes what a command found. JSON is one document per command."""

    def __init__(self, output: Output, stdout: IO[str], stderr: IO[str]) -> None:
        self.output = output
        self._out = _console(stdout)
        self._err = _console(stderr)

    def rows(self, name: str, records: Sequence[Record], columns: Sequence[Column], none: str) -> None:
        """A list: a table, or {name: [...]}. An empty table says `none` on stderr."""
        if self.output is Output.JSON:
            self.document({name: [dict(record) for record in records]})
        elif records:
            self.print(self.table(records, columns))
        else:
            self.note(none)

    def facts(self, record: Record, lines: Sequence[tuple[str, str]]) -> None:
        """One thing: `lines` as title and text, or the record."""
        if self.output is Output.JSON:
            self.document(record)
            return
        table = Table.grid(padding=(0, 2))
        for title, text in lines:
            table.add_row(title, text)
        self.print(table)

    def document(self, record: Record) -> None:
        """One JSON document, keys in the order that they have."""
        # Not through rich: a console may wrap, and JSON must not.
        self._out.file.write(json.dumps(record, indent=2) + "\n")

    def print(self, what: RenderableType) -> None:
        """Data where the output is a table, as wide as it is: a narrow terminal wraps, but nothing is cut."""
        needed = Measurement.get(self._out, self._out.options.update(max_width=WIDEST), what).maximum
        self._out.width = max(self._out.width, needed)
        self._out.print(what, crop=False, no_wrap=True, overflow="ignore")

    def note(self, text: str) -> None:
        """A line for people, never part of the data."""
        self._err.print(text, highlight=False, markup=False)

    @property
    def progress(self) -> Console:
        """Where progress may be shown while something lasts."""
        return self._err

    @staticmethod
    def table(records: Sequence[Any], columns: Sequence[Column], title: str | None = None) -> Table:
        """The records as a table, each a line, in their order."""
        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        for column in columns:
            table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
        for record in records:
            table.add_row(*(column.cell(record) for column in columns))
        return table


def _console(stream: IO[str]) -> Console:
    # A pipe has no width: lines there are as long as they are, so that grep and awk see whole ones.
    return Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else WIDEST)
