# SPDX-License-Identifier: Apache-2.0
"""Keys that must not live (again): what comes late for them is told so, and changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from kvpush_client.events import Fault
from kvpushd.core.words import Instant

K = TypeVar("K", bound=tuple[Any, ...])

KEPT_DETAIL = 256
"""Characters of a fault that are kept: there may be many, and what they quote may be a stranger's."""


class Tombs(Generic[K]):
    """Remembers why a key ended, for a time. A key's first part is its owner, an engine or a link: of each
    owner at most so many are kept, the oldest are forgotten first, and nobody pushes out another's."""

    def __init__(self, keep: Instant, most: int) -> None:
        self._keep = keep
        self._most = most
        self._of: dict[Hashable, OrderedDict[K, tuple[Instant, Fault]]] = {}

    def bury(self, key: K, fault: Fault, now: Instant) -> None:
        """Remembers a key; a key that is buried already keeps its first fault."""
        mine = self._of.setdefault(key[0], OrderedDict())
        if key not in mine:
            mine[key] = (now + self._keep, Fault(fault.reason, fault.detail[:KEPT_DETAIL]))
        while len(mine) > self._most:
            mine.popitem(last=False)

    def dig(self, key: K) -> Fault | None:
        """Why the key ended; None if that is not known."""
        mine = self._of.get(key[0])
        found = mine.get(key) if mine is not None else None
        return found[1] if found is not None else None

    def sweep(self, now: Instant) -> None:
        """Forgets what is old enough. Keys are kept in the order of their burial, hence of their expiry."""
        for owner, mine in list(self._of.items()):
            while mine:
                key, (until, _) = next(iter(mine.items()))
                if until > now:
                    break
                del mine[key]
            if not mine:
                del self._of[owner]

    def forget(self, owner: Hashable) -> None:
        """An owner is no more, and its name is no other's."""
        self._of.pop(owner, None)

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._of.values())
