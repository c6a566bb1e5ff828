# SPDX-License-Identifier: Apache-2.0
"""All handoffs of the node, and what is looked up of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvpush_client.events import TransferKey
from kvpushd.core.handoff import Handoff
from kvpushd.core.ranked import Ranked
from kvpushd.core.words import HalfKey, Incarnation, Instant, Transfer


class Handoffs:
    """By key, by engine, by transfer; the leases of the unmatched ones, and how much those pin.

    A handoff is held until nothing reads its blocks; it is current, i.e. what its transfer's receivers match
    with, from its opening until its fault or a later attempt's opening.
    """

    def __init__(self) -> None:
        self._of: dict[Incarnation, dict[TransferKey, Handoff]] = {}
        self._current: dict[Transfer, Handoff] = {}
        self._leases: Ranked[HalfKey] = Ranked()
        self._pinning: dict[Incarnation, dict[TransferKey, int]] = {}
        """Sealed and unmatched, in the order of their seals, with the blocks they hold."""
        self._pinned: Counter[Incarnation] = Counter()

    def get(self, half: HalfKey | None) -> Handoff | None:
        """The handoff, while it is held."""
        return self._of.get(half[0], {}).get(half[1]) if half is not None else None

    def current(self, transfer: Transfer) -> Handoff | None:
        """The latest attempt of a transfer, unless it has ended."""
        return self._current.get(transfer)

    def add(self, handoff: Handoff) -> None:
        """Holds it."""
        self._of.setdefault(handoff.incarnation, {})[handoff.key] = handoff

    def make_current(self, handoff: Handoff) -> None:
        """Receivers of its transfer match with it from now on."""
        self._current[handoff.transfer] = handoff

    def retire(self, handoff: Handoff) -> None:
        """It has ended, though it may be held for a while: nobody matches with it, no lease runs."""
        if self._current.get(handoff.transfer) is handoff:
            del self._current[handoff.transfer]
        self.keep(handoff)

    def remove(self, handoff: Handoff) -> None:
        """Lets go of it."""
        self.retire(handoff)
        mine = self._of[handoff.incarnation]
        del mine[handoff.key]
        if not mine:
            del self._of[handoff.incarnation]

    def lend(self, handoff: Handoff, deadline: Instant) -> None:
        """It waits for receivers until then, and pins its blocks; said again, what it holds has changed."""
        handoff.deadline = deadline
        self._leases.put(handoff.half, deadline)
        mine = self._pinning.setdefault(handoff.incarnation, {})
        self._pinned[handoff.incarnation] += handoff.block_count - mine.get(handoff.key, 0)
        mine[handoff.key] = handoff.block_count

    def keep(self, handoff: Handoff) -> None:
        """No lease runs for it."""
        handoff.deadline = None
        self._leases.drop(handoff.half)
        mine = self._pinning.get(handoff.incarnation, {})
        self._pinned[handoff.incarnation] -= mine.pop(handoff.key, 0)
        if not mine:
            self._pinning.pop(handoff.incarnation, None)
            del self._pinned[handoff.incarnation]

    def expired(self, now: Instant) -> Iterator[Handoff]:
        """Those whose lease has run out. Each is said once."""
        while (half := self._leases.pop_until(now)) is not None:
            yield self._of[half[0]][half[1]]

    def pinned(self, incarnation: Incarnation) -> int:
        """Blocks of an engine that its unmatched, sealed handoffs hold."""
        return self._pinned[incarnation]

    def oldest_pinning(self, incarnation: Incarnation) -> Handoff:
        """The first sealed of an engine's unmatched ones. There must be one."""
        return self._of[incarnation][next(iter(self._pinning[incarnation]))]

    def of_engine(self, incarnation: Incarnation) -> list[Handoff]:
        """All of an engine, oldest first."""
        return list(self._of.get(incarnation, {}).values())

    def count(self, incarnation: Incarnation) -> int:
        """How many an engine has."""
        return len(self._of.get(incarnation, ()))

    def __iter__(self) -> Iterator[Handoff]:
        return (handoff for mine in self._of.values() for handoff in mine.values())

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._of.values())
