# SPDX-License-Identifier: Apache-2.0
"""Connections that were lost, and what proves of each that nothing of its daemon touches memory any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvpush_client.fdsock import Lifeline


@dataclass(slots=True)
class _Lost:
    generation: int
    lock: bytes
    lifeline: Lifeline
    over: bool = False
    """The lifeline has ended."""


class Fences:
    """Says of each lost generation when it is fenced: once its lifeline ends, or once a daemon that holds the
    lock of that generation's daemon welcomes this launch.

    That daemon is the same one, which welcomes a launch again only when all that its former sessions left is
    fenced; or one that got the lock because the former and all of its movers are dead. A daemon with another
    lock knows nothing of the former one, which may live: somebody removed or replaced its runtime directory.

    One thread calls it.
    """

    def __init__(self, fenced: Callable[[int], None]) -> None:
        """`fenced` hears of a generation, from any thread, perhaps twice."""
        self._fenced = fenced
        self._lost: list[_Lost] = []

    def lost(self, generation: int, lock: bytes, lifeline: Lifeline) -> None:
        """The connection is gone, to a daemon with this lock (empty = it did not say). Owns the lifeline."""
        lost = _Lost(generation, lock, lifeline)
        self._lost.append(lost)
        lifeline.watch(partial(self._ended, lost))

    def welcomed(self, lock: bytes) -> None:
        """A daemon that holds this lock has welcomed the launch."""
        for lost in tuple(self._lost):
            vouched = lock != b"" and lost.lock == lock
            if vouched:
                self._fenced(lost.generation)
            if vouched or lost.over:
                self._lost.remove(lost)
                lost.lifeline.close()

    def _ended(self, lost: _Lost) -> None:
        lost.over = True
        self._fenced(lost.generation)

    def close(self) -> None:
        """Waits for nothing any more."""
        while self._lost:
            self._lost.pop().lifeline.close()
