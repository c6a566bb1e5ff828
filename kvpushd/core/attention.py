# SPDX-License-Identifier: Apache-2.0
"""How eagerly movers look for bytes that come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Attention(Enum):
    """How soon bytes may come in: how eagerly a mover has to look for them."""

    IDLE = "idle"
    EXPECTING = "expecting"
    FILLING = "filling"


class Watch(Generic[K]):
    """Who calls for how much attention; the most eager counts."""

    def __init__(self) -> None:
        self._calls: dict[K, Attention] = {}
        self._counts: Counter[Attention] = Counter()

    def note(self, key: K, attention: Attention) -> None:
        """What a key calls for now; IDLE forgets it."""
        before = self._calls.pop(key, None)
        if before is not None:
            self._counts[before] -= 1
        if attention is not Attention.IDLE:
            self._calls[key] = attention
            self._counts[attention] += 1

    @property
    def most(self) -> Attention:
        """The most eager of all."""
        eager = (level for level in (Attention.FILLING, Attention.EXPECTING) if self._counts[level])
        return next(eager, Attention.IDLE)
