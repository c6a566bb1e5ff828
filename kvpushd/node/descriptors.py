# SPDX-License-Identifier: Apache-2.0
"""The process's descriptors: where none is left, gRPC keeps who comes waiting, and says nothing."""

from __future__ import annotations

import asyncio
import os
from typing import Any

LOOK = 1.0
"""Seconds between looks."""


class Descriptors:
    """Knows whether this process may open another file: for whoever asks, and once each time for the log."""

    def __init__(self, log: Any) -> None:
        """`log` is told."""
        self._log = log
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Why nobody new can be taken; None where that is not known."""
        return self._problem

    def look(self) -> None:
        """Tries, and says so where that ends otherwise than the last time."""
        try:
            os.close(os.dup(2))
        except OSError as error:
            if self._problem is None:
                self._problem = f"it can open no more files, for engines or peers: {error.strerror}"
                self._log.warning(
                    "out of descriptors: who is connected is served, and nobody else",
                    error=error.strerror,
                    mend="raise LimitNOFILE, or find who holds so many connections",
                )
        else:
            if self._problem is not None:
                self._log.info("there are descriptors again")
            self._problem = None

    async def watch(self) -> None:
        """Looks until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK)
