# SPDX-License-Identifier: Apache-2.0
"""Who moves bytes in the wire part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.wire.case import Case


class WrongBytes(RuntimeError):
    """A target pool does not hold what was sent."""


class Contender(Protocol):
    """Whoever moves bytes."""

    name: str

    def turn(self, case: Case) -> float:
        """Moves a pool's worth; returns the seconds. Its processes have nothing to do before and after."""

    def check(self, case: Case) -> None:
        """Raises WrongBytes where the last turn left other bytes than it should have."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes whose CPU time is its own."""

    def close(self) -> None:
        """Ends what it started."""
