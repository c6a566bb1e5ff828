# SPDX-License-Identifier: Apache-2.0
"""Says on stderr what the demo is doing and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status


class Progress:
    """Steps that may overlap: each is shown while it lasts, and noted with its time when it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: list[str] = []
        self._status = Status("", console=console)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows what runs, on a terminal; elsewhere the notes have to do."""
        if not self._console.is_terminal:
            yield
            return
        with self._status:
            yield

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step. It is noted as done only if the context ends well."""
        began = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(f"... {what}")
        self._running.append(what)
        self._update()
        try:
            yield
        finally:
            self._running.remove(what)
            self._update()
        self._console.print(f"ok  {what} ({time.monotonic() - began:.1f} s)")

    def say(self, what: str) -> None:
        """A line."""
        self._console.print(what)

    def _update(self) -> None:
        self._status.update("; ".join(self._running))
