# SPDX-License-Identifier: Apache-2.0
"""The engines behind one prefill server: one, or with data parallel one per rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvpush_router.coordinates import Coordinates

RANK_HEADER = "X-data-parallel-rank"
"""With it vLLM's server gives a request to that one of its engines; without it, to the one that it likes."""


@dataclass(slots=True, eq=False)
class Rank:
    """One engine of a server: what pins a request to it, where its KV is found, how many requests it has."""

    number: int | None = None
    """The value of RANK_HEADER; None = the server chooses."""
    coordinates: Coordinates | None = None
    """None = not known: the decode engine can be told only what the prefill engine answers."""
    busy: int = 0
    turn: int = 0


class Ranks:
    """Chooses the engine of each request to a server, and learns from the answers which there are.

    A server whose answers name an engine `..._dpN` has several. Each number is then tried once, in order,
    until the server refuses one. What engine a number pins to is never guessed: with vLLM's hybrid load
    balancing number 0 is the first engine of that server, and `_dp2` perhaps.
    """

    def __init__(self, coordinates: Coordinates | None = None) -> None:
        self._whole = Rank(None, coordinates)
        self._name = _name(coordinates) if coordinates is not None else None
        self._former: set[tuple[str, bool]] = set()
        self._known: list[Rank] = []
        self._tried: Rank | None = None
        self._counted = False
        self._unsteady = False
        self._turn = 0

    @contextmanager
    def working(self) -> Iterator[Rank]:
        """The engine for one request, which is counted there for as long as the context lasts."""
        rank = self._pick()
        self._turn += 1
        rank.turn = self._turn
        rank.busy += 1
        try:
            yield rank
        finally:
            rank.busy -= 1
            if rank is self._tried:
                self._tried = None

    def _pick(self) -> Rank:
        """The least busy engine; of equals the one whose last turn is longest ago."""
        if self._unsteady:
            return Rank()
        if self._name is None or not self._name[1]:
            return self._whole
        if not self._counted and self._tried is None:
            self._tried = Rank(len(self._known))
            return self._tried
        return min(self._known, key=lambda rank: (rank.busy, rank.turn), default=None) or Rank()

    def learn(self, rank: Rank, params: object) -> None:
        """Takes note of which engine answered a request that was given to `rank`."""
        found = Coordinates.from_params(params)
        if found is None or self._unsteady:
            return
        name = _name(found)
        if name != self._name:
            # A name that comes back was no restart: several servers answer under this URL.
            self._unsteady = name in self._former
            if self._name is not None:
                self._former.add(self._name)
            self._name = name
            self._forget()
        if not found.parallel:
            self._whole.coordinates = found
        elif rank.number is not None:
            self._learn_rank(rank, rank.number, found)

    def _learn_rank(self, rank: Rank, number: int, found: Coordinates) -> None:
        at = {one.number: one.coordinates.engine_id for one in self._known if one.coordinates is not None}
        if at.get(number, found.engine_id) != found.engine_id or (
            number not in at and found.engine_id in at.values()
        ):
            # Something on the way drops the header: what it pins to can't be relied on.
            self._unsteady = True
        elif number in at:
            self._known[number].coordinates = found
        elif number == len(self._known):
            rank.coordinates = found
            self._known.append(rank)

    def refused(self, rank: Rank) -> None:
        """The server has no engine of that number, so none of a higher one either."""
        if rank.number is None:
            return
        del self._known[rank.number :]
        self._counted = True
        self._unsteady = self._unsteady or not self._known

    def doubt(self) -> None:
        """The server did not answer: it may come back with more engines, or as one that can be relied on."""
        self._former.clear()
        self._counted = self._unsteady = False

    def _forget(self) -> None:
        self._known.clear()
        self._whole.coordinates = None
        self._counted = False


def is_refusal(rank: Rank, status: int, text: str) -> bool:
    """An error that says that the server has no engine of `rank`'s number. (vLLM: "data_parallel_rank 2 is
    out of range [0, 2)".)"""
    return rank.number is not None and status == 400 and "data_parallel_rank" in text


def _name(coordinates: Coordinates) -> tuple[str, bool]:
    """What all engines of one server have in common."""
    return coordinates.base, coordinates.parallel
