# SPDX-License-Identifier: Apache-2.0
"""What is to be done, gathered while an event is taken in."""

from __future__ import annotations

from kvpushd.core.instructions import Instruction


class Outbox:
    """Instructions in the order in which they were said."""

    def __init__(self) -> None:
        self._out: list[Instruction] = []

    def say(self, instruction: Instruction) -> None:
        """This is to be done, after what was said before."""
        self._out.append(instruction)

    def take(self) -> list[Instruction]:
        """All since the last call."""
        out, self._out = self._out, []
        return out
