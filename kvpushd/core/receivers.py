# SPDX-License-Identifier: Apache-2.0
"""The receiving engines that have presented themselves, and which of our engines they fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpush_client.events import Fault, Reason
from kvpushd.core.engines import Engine, Engines
from kvpushd.core.lane import Pair
from kvpushd.core.match import pair_up
from kvpushd.core.words import Incarnation, LinkId, ReceiverKey, ReceiverView
from kvpushd.errors import Refused


@dataclass(slots=True)
class _Known:
    view: ReceiverView
    fits: dict[Incarnation, tuple[Pair, ...]] = field(default_factory=dict)
    """By engine of ours: the pairs of ranks. Computed once, since it takes time for each pair and layer."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One of our engines and a receiver that it can send to."""

    engine: Engine
    view: ReceiverView
    pairs: tuple[Pair, ...]


class Receivers:
    """By link and incarnation, from their description until they or their link are gone."""

    def __init__(self, engines: Engines, most: int) -> None:
        """At most `most` are taken in on each link."""
        self._engines = engines
        self._most = most
        self._known: dict[ReceiverKey, _Known] = {}

    def describe(self, link: LinkId, view: ReceiverView, sender_engine_id: str) -> Fault | None:
        """Takes one in if it can receive from an engine of ours, else says why not.

        What it says of itself replaces what it said before, and is judged anew.
        """
        engine = self._engines.named(sender_engine_id)
        if engine is None or not engine.known:
            return _no_such(sender_engine_id)
        taken = self._elsewhere(view) or self._too_many(link, view)
        if taken is not None:
            return taken
        try:
            pairs = pair_up(engine, view)
        except Refused as error:
            return error.fault()
        known = self._known.get((link, view.incarnation))
        if known is None or known.view != view:
            known = self._known[link, view.incarnation] = _Known(view)
        known.fits[engine.incarnation] = pairs
        return None

    def _elsewhere(self, view: ReceiverView) -> Fault | None:
        """A rank of an engine is on one node: whoever else bears its name would be given what is its."""
        mine = self._engines.named(view.engine_id) if view.node else None
        ranks = set(mine.pools) if mine is not None else set()
        for known in self._known.values():
            if known.view.engine_id == view.engine_id and known.view.node != view.node:
                ranks.update(known.view.pools)
        both = sorted(ranks & view.pools.keys())
        if not both:
            return None
        return Fault(
            Reason.DUPLICATE,
            f"rank {both[0]} of engine {view.engine_id!r} is on another node already: give each engine an "
            "engine_id of its own",
        )

    def _too_many(self, link: LinkId, view: ReceiverView) -> Fault | None:
        if not view.node:
            return None
        others = [known for known in self.on(link) if known[1] != view.incarnation]
        if len(others) < self._most:
            return None
        return Fault(Reason.OVER_LIMIT, f"{len(others)} engines are described on this link already")

    def fit(self, receiver: ReceiverKey, sender_engine_id: str) -> Fit | Fault:
        """A described receiver and the engine that it names, or why they don't go together."""
        known = self._known.get(receiver)
        if known is None:
            return Fault(Reason.STALE_INCARNATION, "the receiving engine was not described on this link")
        engine = self._engines.named(sender_engine_id)
        if engine is None or not engine.known:
            return _no_such(sender_engine_id)
        if engine.incarnation not in known.fits:
            try:
                known.fits[engine.incarnation] = pair_up(engine, known.view)
            except Refused as error:
                return error.fault()
        return Fit(engine, known.view, known.fits[engine.incarnation])

    def forget(self, receiver: ReceiverKey) -> bool:
        """It is gone; False where it was not known."""
        return self._known.pop(receiver, None) is not None

    def forget_engine(self, incarnation: Incarnation) -> None:
        """One of our engines left: nothing fits it any more."""
        for known in self._known.values():
            known.fits.pop(incarnation, None)

    def on(self, link: LinkId) -> list[ReceiverKey]:
        """Those that were described on a link."""
        return [receiver for receiver in self._known if receiver[0] == link]


def _no_such(engine_id: str) -> Fault:
    return Fault(Reason.NO_SUCH_ENGINE, f"no engine {engine_id!r} is registered on this node")
