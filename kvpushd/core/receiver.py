# SPDX-License-Identifier: Apache-2.0
"""The receiving side: reservations, from the promise of blocks to their release (see reservation.py)."""

from __future__ import annotations

from dataclasses import replace

from kvpush_client.events import Fault, Reason, Side
from kvpushd.core.attention import Attention
from kvpushd.core.engines import Engine, Engines, Limits, is_local
from kvpushd.core.events import (
    Announced,
    Cancelled,
    Declined,
    InletClosed,
    LinkLost,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    Reached,
    ReceiverGone,
    Reserved,
    Withdrawn,
)
from kvpushd.core.handoff import add
from kvpushd.core.instructions import (
    CloseInlet,
    Reach,
    SayAnnounce,
    SayReceiverGone,
    SayWithdraw,
    TellMatched,
    TellRejected,
    TellReservationEnded,
    TellReservationReleased,
)
from kvpushd.core.layout import check_blocks
from kvpushd.core.match import shortfall
from kvpushd.core.outbox import Outbox
from kvpushd.core.reservation import LIVE, UNFENCED, Part, Reservation, Word
from kvpushd.core.reservations import Reservations
from kvpushd.core.tombs import Tombs
from kvpushd.core.ways import InletKey, RouteKey, Way, Ways
from kvpushd.core.words import HalfKey, Incarnation, Instant, LinkId, Times
from kvpushd.errors import Refused

# After a fault of this kind its sender can't vouch for the fence: the inlet is closed at once.
CANT_VOUCH = frozenset({Reason.TRANSPORT_FAILED, Reason.MOVER_DIED, Reason.CORRUPTED})
# What no other try of this receiver's changes: a sender that waits for it would wait for its lease.
NEVER_WANTED = frozenset({Reason.CANCELLED, Reason.FINGERPRINT_MISMATCH, Reason.LAYOUT_MISMATCH})


class Receiver:
    """All reservations of the node's engines. Events in, instructions out; see Ledger."""

    def __init__(self, engines: Engines, limits: Limits, out: Outbox) -> None:
        self._engines = engines
        self._limits = limits
        self._out = out
        self._halves = Reservations()
        self._ways = Ways()
        self._over: Tombs[HalfKey] = Tombs(limits.lease, limits.tombs_per_engine)
        self._cancelled_early: Tombs[HalfKey] = Tombs(limits.lease, limits.tombs_per_engine)
        self.draining = False

    # --- from the engine ---------------------------------------------------------------------------------

    def reserved(self, event: Reserved, now: Instant) -> None:
        """Takes a reservation in, or says why not."""
        engine = self._engines.get(event.incarnation)
        if engine is None or engine.left:
            return
        live = self._halves.get(event.incarnation, event.key)
        if live is not None:
            if not live.says_the_same(event):
                self._reject(event, Reason.DUPLICATE, f"transfer {event.key} is reserved, with other blocks")
            return
        over = self._over.dig((event.incarnation, event.key))
        if over is not None:
            self._reject(event, Reason.STALE_ATTEMPT, f"transfer {event.key} is over; use a new attempt")
            return
        lease = self._limits.lease if event.lease is None else event.lease
        parts = {sender.link: Part.WAITING for sender in event.senders}
        half = Reservation(event, engine.engine_id, now + lease, Times(opened=now), parts)
        fault = self._cancelled_early.dig(half.half) or self._refusal(event, engine)
        self._halves.add(half)
        if fault is not None:
            self._end(half, fault, now)
        else:
            self._announce(half, engine)

    def _refusal(self, event: Reserved, engine: Engine) -> Fault | None:
        mine = self._halves.count(event.incarnation)
        if self.draining:
            return Fault(Reason.DRAINING, "this node drains and takes no new reservations")
        if not event.senders:
            return Fault(Reason.INVALID, "a reservation names at least one sender")
        if len({sender.link for sender in event.senders}) < len(event.senders):
            return Fault(Reason.INVALID, "a reservation names one sender for each node of the sending engine")
        if event.start >= event.end:
            return Fault(Reason.INVALID, f"positions [{event.start}, {event.end}) are empty")
        if any(sender.engine_id == engine.engine_id for sender in event.senders):
            return Fault(Reason.INVALID, f"engine {engine.engine_id} can't send to itself")
        if mine >= self._limits.halves_per_engine:
            return Fault(Reason.OVER_LIMIT, f"engine {engine.engine_id} has {mine} reservations already")
        return _wrong_blocks(event, engine)

    def cancelled(self, event: Cancelled, now: Instant) -> None:
        """The engine takes a reservation back; one that is not known yet will end as it comes."""
        half = self._halves.get(event.incarnation, event.key)
        fault = Fault(Reason.CANCELLED, event.detail)
        if half is not None:
            self._end(half, fault, now)
        elif self._over.dig((event.incarnation, event.key)) is None:
            self._cancelled_early.bury((event.incarnation, event.key), fault, now)

    def declined(self, event: Declined) -> None:
        """Lets the senders of a transfer know that nothing is wanted."""
        fault = Fault(Reason.NOT_WANTED, "the receiver has the KV already")
        for sender in event.senders:
            self._out.say(SayWithdraw(Withdrawn(sender.link, None, event.key, sender.engine_id, fault)))

    def engine_ready(self, engine: Engine, now: Instant) -> None:
        """The engine's pools are all mapped: what waited for that can be announced."""
        for half in self._halves.of_engine(engine.incarnation):
            fault = _wrong_blocks(half.said, engine)
            if fault is not None:
                self._end(half, fault, now)
            elif half.fault is None:
                self._announce(half, engine)

    def engine_left(self, engine: Engine, detail: str, now: Instant) -> None:
        """Nobody waits any more; the blocks still have to be fenced."""
        for half in self._halves.of_engine(engine.incarnation):
            self._end(half, Fault(Reason.ENGINE_GONE, detail), now)
        self._close_when_fenced(engine.incarnation)

    # --- from the peers ----------------------------------------------------------------------------------

    def reached(self, event: Reached, now: Instant) -> None:
        """A route is up, or could not be made; then whoever waits for it ends at once."""
        route = (event.link, event.incarnation, event.sender_engine_id)
        if not self._ways.reached(route, up=event.fault is None):
            return
        engine = self._engines.get(event.incarnation)
        for half in self._halves.waiting(event.link, event.incarnation):
            if half.sender_on(event.link).engine_id != event.sender_engine_id:
                continue
            if event.fault is not None:
                self._end(half, event.fault, now)
            elif engine is not None:
                self._announce(half, engine)

    def link_lost(self, event: LinkLost, now: Instant) -> None:
        """Everything on the link ends at once; what may still land is fenced by closing the inlets."""
        fault = Fault(Reason.PEER_UNREACHABLE, event.detail)
        used = set(self._ways.used_on(event.link))
        inlets = self._ways.inlets(link=event.link)
        for half in list(self._halves):
            part = half.parts.get(event.link)
            if part in UNFENCED or (part is Part.WAITING and self._route(half, event.link) in used):
                self._end(half, fault, now)
        for inlet in inlets:
            self._close(inlet)

    def _route(self, half: Reservation, link: LinkId) -> RouteKey:
        return link, half.incarnation, half.sender_on(link).engine_id

    def inlet_closed(self, event: InletClosed, now: Instant) -> None:
        """The last rung of the fence ladder: all that came through it is fenced."""
        if not self._ways.closed((event.link, event.incarnation)):
            return
        for half in self._halves.of_engine(event.incarnation):
            if self._hear(half, event.link, Word.FENCED):
                self._end(half, Fault(Reason.FENCED, "its inlet was closed"), now)
        engine = self._engines.get(event.incarnation)
        for half in self._halves.waiting(event.link, event.incarnation):
            if engine is not None:
                self._announce(half, engine)
        self._close_when_fenced(event.incarnation)

    def matched(self, event: PeerMatched, now: Instant) -> None:
        """The sender has the handoff; with the last such word the lease stops."""
        half = self._halves.get(event.incarnation, event.key)
        if half is not None and self._hear(half, event.link, Word.MATCHED):
            self._note_match(half, now)

    def moving(self, event: PeerMoving, now: Instant) -> None:
        """Bytes come in."""
        half = self._halves.get(event.incarnation, event.key)
        if half is not None and self._hear(half, event.link, Word.MOVING):
            if not half.times.first_post:
                half.times = replace(half.times, first_post=now)
            self._note_match(half, now)

    def landed(self, event: PeerLanded, now: Instant) -> None:
        """One sender's part is complete."""
        half = self._halves.get(event.incarnation, event.key)
        if half is not None and self._hear(half, event.link, Word.LANDED):
            half.counts = add(half.counts, event.counts)
            half.moved[event.link] = event.counts.bytes
            half.sender_times = event.times
            half.times = replace(half.times, landed=now)
            self._note_match(half, now)
            engine = self._engines.get(half.incarnation)
            missing = shortfall(half, engine) if engine is not None else None
            if missing is not None:
                self._end(half, missing, now)
            self._settle(half, now)

    def ended(self, event: PeerEnded, now: Instant) -> None:
        """One sender's part will not come."""
        half = self._halves.get(event.incarnation, event.key)
        word = Word.FENCED if event.fenced else Word.ENDED
        if half is None or not self._hear(half, event.link, word):
            return
        self._end(half, event.fault, now)
        if not event.fenced and event.fault.reason in CANT_VOUCH and not is_local(event.link):
            self._fence((event.link, event.incarnation), now)

    def fenced(self, event: PeerFenced, now: Instant) -> None:
        """One sender's writes are all terminal."""
        half = self._halves.get(event.incarnation, event.key)
        if half is not None and half.fault is not None and self._hear(half, event.link, Word.FENCED):
            self._settle(half, now)

    def mover_died(self, incarnation: Incarnation, now: Instant) -> None:
        """Nothing comes into the engine's pools any more, over whatever way."""
        detail = "the receiving mover died"
        for inlet in self._ways.died(incarnation):
            self._say_gone(*inlet, detail)
        self._forget_routes(incarnation, detail)
        for half in self._halves.of_engine(incarnation):
            heard = [self._hear(half, link, Word.FENCED) for link in half.parts]
            if True in heard:
                self._end(half, Fault(Reason.MOVER_DIED, detail), now)
        self._close_when_fenced(incarnation)

    def tick(self, now: Instant) -> None:
        """Leases, and the patience of the fence ladder."""
        for half in self._halves.due(now):
            if half.fault is None:
                far = Part.WAITING in half.parts.values()
                what = "its sender was not reached" if far else "no handoff came"
                self._end(half, Fault(Reason.EXPIRED, f"{what} within the lease"), now)
            else:
                for link in half.unfenced:
                    self._fence((link, half.incarnation), now)
        self._over.sweep(now)
        self._cancelled_early.sweep(now)

    def _fence(self, inlet: InletKey, now: Instant) -> None:
        """Closes an inlet on purpose: its other transfers fail too, and the peer is told."""
        if not self._close(inlet):
            return
        link, incarnation = inlet
        self._say_gone(link, incarnation, "its inlet was closed to fence blocks")
        fault = Fault(Reason.FENCED, "the inlet was closed to fence other blocks of this peer")
        for half in self._halves.of_engine(incarnation):
            if half.parts.get(link) in LIVE:
                self._end(half, fault, now)

    # --- how a half goes on ------------------------------------------------------------------------------

    def _announce(self, half: Reservation, engine: Engine) -> None:
        """Announces every part that can be, and opens the way for those that can't."""
        if not engine.ready:
            return
        said = half.said
        for link, part in half.parts.items():
            if part is not Part.WAITING:
                continue
            route = self._route(half, link)
            if self._ways.get(route) is Way.UP:
                self._hear(half, link, Word.ANNOUNCE)
                where = (said.start, said.end, said.blocks, said.priority, said.prompt)
                self._out.say(SayAnnounce(Announced(link, said.incarnation, said.key, route[2], *where)))
            elif self._ways.may_reach(route):
                self._ways.reach(route)
                self._out.say(Reach(*route))

    def _hear(self, half: Reservation, link: LinkId, word: Word) -> bool:
        """Applies a word about a part; False where it changes nothing."""
        heard = half.hear(link, word)
        if heard:
            self._halves.heard(half, link)
        return heard

    def _note_match(self, half: Reservation, now: Instant) -> None:
        """With the last sender's word the lease stops."""
        if not half.matched or half.fault is not None or half.times.matched:
            return
        half.times = replace(half.times, matched=now)
        self._halves.wake(half, None)
        if self._lives(half):
            self._out.say(TellMatched(half.incarnation, half.key, Side.RECEIVER))

    def _end(self, half: Reservation, fault: Fault, now: Instant) -> None:
        """Ends a half with a fault, unless it has one; takes back what was announced."""
        if half.fault is None:
            half.fault, half.faulted_at = fault, now
            self._halves.wake(half, now + self._limits.fence_patience)
            for link, part in half.parts.items():
                name = half.sender_on(link).engine_id
                if part in LIVE:
                    self._out.say(SayWithdraw(Withdrawn(link, half.incarnation, half.key, name, fault)))
                elif part is Part.WAITING and fault.reason in NEVER_WANTED:
                    # It was never announced, so nobody else tells the sender that its KV is not wanted.
                    self._out.say(SayWithdraw(Withdrawn(link, None, half.key, name, fault)))
        self._settle(half, now)

    def _settle(self, half: Reservation, now: Instant) -> None:
        """Tells the engine what is new, exactly once each, and forgets the half once it is released."""
        if self._halves.get(half.incarnation, half.key) is not half:
            return
        if half.fault is None and not half.landed:
            return
        released = half.fenced
        if self._lives(half):
            if not half.told:
                told = TellReservationEnded(half.incarnation, half.key, half.fault, released, half.counts)
                self._out.say(told)
            elif released:
                self._out.say(TellReservationReleased(half.incarnation, half.key))
        half.told = True
        self._halves.watch(half)
        if released:
            self._halves.remove(half)
            self._over.bury(half.half, half.fault or Fault(Reason.UNSPECIFIED, "landed"), now)
            self._out.say(half.account(now))
            self._close_when_fenced(half.incarnation)

    def _close(self, inlet: InletKey) -> bool:
        if not self._ways.close(inlet):
            return False
        self._out.say(CloseInlet(*inlet))
        return True

    def _close_when_fenced(self, incarnation: Incarnation) -> None:
        """Of an engine that left and holds nothing any more, the inlets go as well."""
        engine = self._engines.get(incarnation)
        if engine is None or not engine.left or self._halves.count(incarnation):
            return
        for inlet in self._ways.inlets(incarnation=incarnation):
            if self._close(inlet):
                self._say_gone(*inlet, "the engine left")
        self._forget_routes(incarnation, "the engine left")

    def _forget_routes(self, incarnation: Incarnation, detail: str) -> None:
        for link, _, _ in self._ways.forget(incarnation):
            if is_local(link):
                self._say_gone(link, incarnation, detail)

    def _say_gone(self, link: LinkId, incarnation: Incarnation, detail: str) -> None:
        self._out.say(SayReceiverGone(ReceiverGone(link, incarnation, detail)))

    def _lives(self, half: Reservation) -> bool:
        engine = self._engines.get(half.incarnation)
        return engine is not None and not engine.left

    def _reject(self, event: Reserved, reason: Reason, detail: str) -> None:
        self._out.say(TellRejected(event.incarnation, event.key, Side.RECEIVER, Fault(reason, detail)))

    def forget(self, incarnation: Incarnation) -> None:
        """Nothing comes of an engine any more."""
        self._over.forget(incarnation)
        self._cancelled_early.forget(incarnation)

    # --- what is held ------------------------------------------------------------------------------------

    def halves(self) -> list[Reservation]:
        """All that hold blocks, oldest first of each engine."""
        return list(self._halves)

    @property
    def idle(self) -> bool:
        """No blocks are held."""
        return not len(self._halves)

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether a reservation or an inlet of the engine is left."""
        return self._halves.count(incarnation) > 0 or bool(self._ways.inlets(incarnation=incarnation))

    @property
    def attention(self) -> Attention:
        """How soon bytes may come in from other nodes."""
        return self._halves.attention


def _wrong_blocks(event: Reserved, engine: Engine) -> Fault | None:
    for layout in engine.pools.values():
        try:
            check_blocks(layout, event.blocks, event.start, event.end)
        except Refused as error:
            return error.fault()
    return None
