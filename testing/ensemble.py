# SPDX-License-Identifier: Apache-2.0
"""What a run has begun: all of it is closed with it, also where one part of it does not start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Self


class Ensemble(ABC):
    """Processes that begin and end together. Use it as a context."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        """What is to be closed, the last first."""

    @abstractmethod
    def _begin(self) -> None:
        """Starts everything, and puts on the stack what has to be closed before it can fail."""

    def __enter__(self) -> Self:
        with ExitStack() as undone:
            undone.callback(self.close)
            self._begin()
            undone.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything."""
        self._stack.close()
