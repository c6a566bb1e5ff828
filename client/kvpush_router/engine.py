# SPDX-License-Identifier: Apache-2.0
"""The engines behind the router, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvpush_router.coordinates import Coordinates
from kvpush_router.ranks import Ranks

REST_SECONDS = 5.0
"""So long an engine that did not answer is asked only when all others rest too."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the flags say of an engine."""

    url: str
    coordinates: Coordinates | None = None


class Engine:
    """What answers at one URL: how many requests it has now, and which engines are behind it."""

    def __init__(self, spec: EngineSpec) -> None:
        self.url = spec.url
        self.ranks = Ranks(spec.coordinates)
        self.busy = 0
        self.rests_until = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts one request for as long as the context lasts."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def rest(self, now: float) -> None:
        """Notes that the engine did not answer at `now`."""
        self.rests_until = now + REST_SECONDS
        self.ranks.doubt()


class Fleet:
    """Engines of one kind. Picks the least busy; the first named wins a tie."""

    def __init__(self, specs: Sequence[EngineSpec]) -> None:
        self.engines = [Engine(spec) for spec in specs]

    def pick(self, now: float, without: Sequence[Engine] = ()) -> Engine | None:
        """The least busy engine not in `without`; one that rests only if all do; None if none is left."""
        left = [engine for engine in self.engines if engine not in without]
        return min(left, key=lambda engine: (engine.rests_until > now, engine.busy), default=None)
