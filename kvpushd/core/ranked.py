# SPDX-License-Identifier: Apache-2.0
"""Keys in the order of their ranks, whatever becomes of them in between."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Ranked(Generic[K]):
    """Each key with a rank, the lowest first; among equals the one that was put first.

    A rank is an int or a tuple of ints. Putting, dropping and looking cost about the logarithm of the size.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[Any, int]] = {}
        self._heap: list[tuple[Any, int, K]] = []
        """Also holds what was dropped or put anew since: the number tells."""
        self._number = 0

    def put(self, key: K, rank: Any) -> None:
        """Gives a key its rank, in place of the one that it had."""
        known = self._ranks.get(key)
        if known is not None and known[0] == rank:
            return
        self._number += 1
        self._ranks[key] = (rank, self._number)
        heappush(self._heap, (rank, self._number, key))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, number, key) for key, (rank, number) in self._ranks.items()]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """Forgets a key, if it is there."""
        self._ranks.pop(key, None)

    def first(self) -> tuple[K, Any] | None:
        """The key of the lowest rank, and that rank."""
        while self._heap:
            rank, number, key = self._heap[0]
            if self._ranks.get(key, (None, 0))[1] == number:
                return key, rank
            heappop(self._heap)
        return None

    def pop_until(self, rank: Any) -> K | None:
        """Takes the first key out if its rank is at most `rank`."""
        found = self.first()
        if found is None or found[1] > rank:
            return None
        del self._ranks[found[0]]
        return found[0]

    def __iter__(self) -> Iterator[K]:
        """Over those that are there now, in no order; they may be put anew meanwhile."""
        return iter(list(self._ranks))

    def __contains__(self, key: K) -> bool:
        return key in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)
