# SPDX-License-Identifier: Apache-2.0
"""Keys that must not live (again): what comes late for them is told so, and changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvpush_client.events import Fault
from kvpushd.core.words import Instant

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
