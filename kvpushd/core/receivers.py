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

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._known: dict[ReceiverKey, _Known] = {}

    def describe(self, link: LinkId, view: ReceiverView, sender_engine_id: str) -> Fault | None:
        """Takes one in if it can receive from an engine of ours, else says why not.

        What it says of itself replaces what it said before, and is judged anew.
        """
        engine = self._engines.named(sender_engine_id)
        if engine is None or not engine.known:
            return _no_such(sender_engine_id)
        try:
            pairs = pair_up(engine, view)
        except Refused as error:
            return error.fault()
        known = self._known.get((link, view.incarnation))
        if known is None or known.view != view:
            known = self._known[link, view.incarnation] = _Known(view)
        known.fits[engine.incarnation] = pairs
        return None

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
