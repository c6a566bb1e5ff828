# SPDX-License-Identifier: Apache-2.0
"""Keys that must not live (again): what comes late for them is told so, and changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvpush_client.events import Fault
from kvpushd.core.words import Instant, LinkId, TargetKey

K = TypeVar("K", bound=Hashable)


class Tombs(Generic[K]):
    """Remembers why a key ended, for a time, and at most so many: the oldest are forgotten first."""

    def __init__(self, keep: Instant, most: int) -> None:
        self._keep = keep
        self._most = most
        self._faults: OrderedDict[K, tuple[Instant, Fault]] = OrderedDict()

    def bury(self, key: K, fault: Fault, now: Instant) -> None:
        """Remembers a key; a key that is buried already keeps its first fault."""
        if key not in self._faults:
            self._faults[key] = (now + self._keep, fault)
        while len(self._faults) > self._most:
            self._faults.popitem(last=False)

    def dig(self, key: K) -> Fault | None:
        """Why the key ended; None if that is not known."""
        found = self._faults.get(key)
        return found[1] if found else None

    def sweep(self, now: Instant) -> None:
        """Forgets what is old enough. Keys are kept in the order of their burial, hence of their expiry."""
        while self._faults:
            key, (until, _) = next(iter(self._faults.items()))
            if until > now:
                break
            del self._faults[key]

    def __len__(self) -> int:
        return len(self._faults)


class TargetTombs:
    """Of each link its own: they go with it, and many on one push out none of another's."""

    def __init__(self, keep: Instant, most: int) -> None:
        self._keep = keep
        self._most = most
        self._of: dict[LinkId, Tombs[TargetKey]] = {}

    def bury(self, key: TargetKey, fault: Fault, now: Instant) -> None:
        """Remembers a target; one that is buried already keeps its first fault."""
        mine = self._of.get(key[0])
        if mine is None:
            mine = self._of[key[0]] = Tombs(self._keep, self._most)
        mine.bury(key, fault, now)

    def dig(self, key: TargetKey) -> Fault | None:
        """Why the target ended; None if that is not known."""
        mine = self._of.get(key[0])
        return mine.dig(key) if mine is not None else None

    def sweep(self, now: Instant) -> None:
        """Forgets what is old enough."""
        for link, mine in list(self._of.items()):
            mine.sweep(now)
            if not len(mine):
                del self._of[link]

    def forget(self, link: LinkId) -> None:
        """A link is no more, and its name is no other's."""
        self._of.pop(link, None)

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._of.values())
