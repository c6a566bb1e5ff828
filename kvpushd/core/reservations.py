# SPDX-License-Identifier: Apache-2.0
"""All reservations of the node, and what is looked up of them."""

from __future__ import annotations

from collections.abc import Iterator

from kvpush_client.events import TransferKey
from kvpushd.core.attention import Attention, Watch
from kvpushd.core.ranked import Ranked
from kvpushd.core.reservation import Part, Reservation
from kvpushd.core.words import HalfKey, Incarnation, Instant, LinkId, ReceiverKey


class Reservations:
    """By engine and key; when something is due, and how eagerly bytes are awaited."""

    def __init__(self) -> None:
        self._of: dict[Incarnation, dict[TransferKey, Reservation]] = {}
        self._due: Ranked[HalfKey] = Ranked()
        self._watch: Watch[HalfKey] = Watch()
        self._waiting: dict[ReceiverKey, dict[TransferKey, Reservation]] = {}
        """Those with a part that is to be announced, by link and engine."""

    def get(self, incarnation: Incarnation, key: TransferKey) -> Reservation | None:
        """The reservation, while it is held."""
        return self._of.get(incarnation, {}).get(key)

    def add(self, half: Reservation) -> None:
        """Holds one, until its lease runs out."""
        self._of.setdefault(half.incarnation, {})[half.key] = half
        self._due.put(half.half, half.deadline)
        self.watch(half)
        for link, part in half.parts.items():
            if part is Part.WAITING:
                self._waiting.setdefault((link, half.incarnation), {})[half.key] = half

    def remove(self, half: Reservation) -> None:
        """Lets go of it."""
        mine = self._of[half.incarnation]
        del mine[half.key]
        if not mine:
            del self._of[half.incarnation]
        self._due.drop(half.half)
        self._watch.note(half.half, Attention.IDLE)
        for link in half.parts:
            self._settle(half, link)

    def _settle(self, half: Reservation, link: LinkId) -> None:
        """Nothing of it is to be announced on a link."""
        owner = (link, half.incarnation)
        mine = self._waiting.get(owner, {})
        mine.pop(half.key, None)
        if not mine:
            self._waiting.pop(owner, None)

    def heard(self, half: Reservation, link: LinkId) -> None:
        """Something was said of its part on a link."""
        if half.parts[link] is Part.ANNOUNCED:
            self._settle(half, link)
        self.watch(half)

    def wake(self, half: Reservation, at: Instant | None) -> None:
        """Has it come up in `due` at that time, instead of any other; None = not at all."""
        if at is None:
            self._due.drop(half.half)
        else:
            self._due.put(half.half, at)

    def due(self, now: Instant) -> Iterator[Reservation]:
        """Those whose time has come. Each is said once."""
        while (half := self._due.pop_until(now)) is not None:
            yield self._of[half[0]][half[1]]

    def watch(self, half: Reservation) -> None:
        """Something has become of it."""
        self._watch.note(half.half, half.attention)

    @property
    def attention(self) -> Attention:
        """How soon bytes may come in from other nodes."""
        return self._watch.most

    def of_engine(self, incarnation: Incarnation) -> list[Reservation]:
        """All of an engine, oldest first."""
        return list(self._of.get(incarnation, {}).values())

    def count(self, incarnation: Incarnation) -> int:
        """How many an engine has."""
        return len(self._of.get(incarnation, ()))

    def waiting(self, link: LinkId, incarnation: Incarnation) -> list[Reservation]:
        """Those of an engine that are to be announced on a link, as soon as there is a way."""
        return [half for half in self._waiting.get((link, incarnation), {}).values() if half.fault is None]

    def __iter__(self) -> Iterator[Reservation]:
        return (half for mine in self._of.values() for half in mine.values())

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._of.values())
