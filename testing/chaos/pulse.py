# SPDX-License-Identifier: Apache-2.0
"""How long a machine let nobody run: what a promise in seconds can't count."""

from __future__ import annotations

import threading
import time
from types import TracebackType

BEAT = 0.05
LEAST = 0.5
"""Seconds by which a beat must be late to say something of the machine. Two ranks of vLLM that wait for
one another by sched_yield had both cores for six seconds, and all else 1 % of one (docs/failures.md)."""


class Pulse:
    """Beats on a thread of its own, within its context."""

    def __init__(self) -> None:
        self.starved = 0.0
        """Seconds of this context's time in which the machine gave none."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(BEAT):
            now = time.monotonic()
            late = now - before - BEAT
            if late >= LEAST:
                self.starved += late
            before = now
