# SPDX-License-Identifier: Apache-2.0
"""The sending side: what engines and receivers say to it. What becomes of it is for transfers.py."""

from __future__ import annotations

from dataclasses import replace

from kvpush_client.events import Fault, Reason, Side
from kvpushd.core.early import Early
from kvpushd.core.engines import Engine, Engines, Limits, is_local
from kvpushd.core.events import (
    Advanced,
    Announced,
    Cancelled,
    Described,
    HandedOff,
    PeerEnded,
    Reached,
    ReceiverGone,
    ReceiverLost,
    Withdrawn,
    WriteEnded,
)
from kvpushd.core.handoff import Handoff
from kvpushd.core.instructions import CloseOutlet, SayPeer, SayReached, TellRejected
from kvpushd.core.lane import Frontier
from kvpushd.core.layout import check_blocks
from kvpushd.core.match import lanes_between
from kvpushd.core.outbox import Outbox
from kvpushd.core.receivers import Fit, Receivers
from kvpushd.core.target import Target, everybody
from kvpushd.core.tombs import Tombs
from kvpushd.core.transfers import Transfers, as_peers_see
from kvpushd.core.words import HalfKey, Incarnation, Instant, LinkId, ReceiverKey, Times
from kvpushd.errors import Refused


class Sender:
    """All handoffs of the node's engines. Events in, instructions out; see Ledger."""

    def __init__(self, engines: Engines, limits: Limits, out: Outbox) -> None:
        self._engines = engines
        self._limits = limits
        self._out = out
        self._transfers = Transfers(engines, limits, out)
        self._handoffs = self._transfers.handoffs
        self._targets = self._transfers.targets
        self._receivers = Receivers(engines, limits.engines_per_link)
        self._early = Early(limits.lease, limits.early_per_engine)
        self._cancelled_early: Tombs[HalfKey] = Tombs(limits.lease, limits.tombs_per_engine)
        self.draining = False

    # --- from the engine ---------------------------------------------------------------------------------

    def handed_off(self, event: HandedOff, now: Instant) -> None:
        """Opens a handoff, appends to it, seals it; or, where the item is wrong, does none of these."""
        half = (event.incarnation, event.key)
        engine = self._engines.get(event.incarnation)
        if engine is None or engine.left:
            return
        if self._transfers.ended.dig(half) is not None:
            # Late, for which the client knows better; or opened again, and then its engine waits for an end.
            over = Fault(Reason.STALE_ATTEMPT, f"transfer {event.key} is over; use a new attempt")
            self._out.say(TellRejected(event.incarnation, event.key, Side.SENDER, over))
            return
        handoff = self._handoffs.get(half)
        if handoff is not None and handoff.fault is not None:
            return
        wrong = _wrong_blocks(event, engine) or self._stale(event, handoff)
        if wrong is None and handoff is not None:
            wrong = _append(handoff, event, engine)
        if wrong is not None:
            self._out.say(TellRejected(event.incarnation, event.key, Side.SENDER, wrong))
            return
        if handoff is None:
            handoff = self._open(event, engine, now)
        elif handoff.deadline is not None:
            self._transfers.lend(handoff, handoff.deadline, now)
        if event.seal is not None and handoff.seal is None and handoff.fault is None:
            self._seal(handoff, event.seal, now)
        self._transfers.go_on(handoff, engine, now)

    def _stale(self, event: HandedOff, handoff: Handoff | None) -> Fault | None:
        if handoff is not None:
            if event.seal in (None, handoff.seal) or handoff.seal is None:
                return None
            return Fault(
                Reason.INVALID, f"sealed at {event.seal}, but it was sealed at {handoff.seal} before"
            )
        current = self._handoffs.current((event.incarnation, event.key.transfer_id))
        if current is None or current.key.attempt < event.key.attempt:
            return None
        return Fault(Reason.STALE_ATTEMPT, f"attempt {current.key.attempt} of this transfer is open")

    def _open(self, event: HandedOff, engine: Engine, now: Instant) -> Handoff:
        """Opens a handoff, if only to end it at once: an attempt before it ends either way."""
        fault = self._refusal(event, engine)
        handoff = Handoff(
            incarnation=event.incarnation,
            engine_id=engine.engine_id,
            key=event.key,
            label=event.label,
            receiver_engine_id=event.receiver_engine_id,
            lease=self._limits.lease if event.lease is None else event.lease,
            frontiers={rank: Frontier.at_start(len(pool.layers)) for rank, pool in engine.pools.items()},
            blocks={blocks.group: blocks for blocks in event.blocks},
            prompts=event.prompts,
            times=Times(opened=now),
        )
        old = self._handoffs.current(handoff.transfer)
        self._handoffs.add(handoff)
        early = self._early.take(handoff.half)
        if fault is not None:
            if old is not None:
                self._transfers.end(old, fault, now)
            self._transfers.end(handoff, fault, now)
            return handoff
        if early is not None:
            handoff.frontiers.update(early.frontiers)
            handoff.advanced_at = early.at
        self._handoffs.make_current(handoff)
        if old is not None:
            self._transfers.take_over(old, handoff, now)
        for target in self._targets.waiting_for(handoff.transfer):
            self._transfers.attach(target, handoff, now)
        return handoff

    def _refusal(self, event: HandedOff, engine: Engine) -> Fault | None:
        mine = self._handoffs.count(event.incarnation)
        transfer = (event.incarnation, event.key.transfer_id)
        # What an engine does over is not new.
        new = self._handoffs.current(transfer) is None
        if new and self.draining:
            return Fault(Reason.DRAINING, "this node drains and takes no new handoffs")
        if new and mine >= self._limits.halves_per_engine:
            return Fault(Reason.OVER_LIMIT, f"engine {engine.engine_id} has {mine} handoffs already")
        if not engine.known:
            return Fault(
                Reason.NO_SUCH_ENGINE, f"engine {engine.engine_id} has not registered all of its pools"
            )
        return self._transfers.over.dig(transfer) or self._cancelled_early.dig((event.incarnation, event.key))

    def _seal(self, handoff: Handoff, seal: int, now: Instant) -> None:
        handoff.seal = seal
        _note_completion(handoff, now)
        if not everybody(self._targets.these(handoff.targets)):
            self._transfers.lend(handoff, now + handoff.lease, now)

    def advanced(self, event: Advanced, now: Instant) -> None:
        """A worker says how far a handoff is final in its pool."""
        half = (event.incarnation, event.key)
        engine = self._engines.get(event.incarnation)
        if engine is None or engine.left:
            return
        handoff = self._handoffs.get(half)
        wrong = engine.lacks(event.rank, event.first_layer, event.end_layer)
        if wrong is not None:
            # That ends it, where a wrong item of the scheduler's is as if it had not been said: nobody would
            # say what the worker meant to, and both sides would wait for it.
            fault = Fault(Reason.INVALID, wrong)
            if handoff is not None:
                self._transfers.end(handoff, fault, now)
            elif self._transfers.ended.dig(half) is None:
                self._cancelled_early.bury(half, fault, now)
            return
        if handoff is None:
            if self._transfers.ended.dig(half) is None and not self._early.note(event, engine, now):
                detail = f"engine {engine.engine_id} has advanced {self._limits.early_per_engine} handoffs "
                detail += "that it has not opened"
                self._cancelled_early.bury(half, Fault(Reason.OVER_LIMIT, detail), now)
            return
        frontier = handoff.frontiers.get(event.rank)
        if frontier is None or handoff.fault is not None:
            return
        frontier.advance(event.positions, event.first_layer, event.end_layer)
        handoff.advanced_at = max(handoff.advanced_at, event.at)
        _note_completion(handoff, now)
        self._transfers.more(handoff, engine)

    def cancelled(self, event: Cancelled, now: Instant) -> None:
        """The engine takes a handoff back; one that is not known yet will end as it comes."""
        half = (event.incarnation, event.key)
        fault = Fault(Reason.CANCELLED, event.detail)
        handoff = self._handoffs.get(half)
        if handoff is not None:
            self._transfers.end(handoff, fault, now)
        elif self._transfers.ended.dig(half) is None:
            self._cancelled_early.bury(half, fault, now)

    def engine_ready(self, engine: Engine) -> None:
        """Its pools are mapped (again): what is final in them can be written."""
        for handoff in self._handoffs.of_engine(engine.incarnation):
            self._transfers.offer(handoff, engine)

    def mover_died(self, incarnation: Incarnation) -> None:
        """Writes in flight end by events of their own; none is posted until the pools are mapped again."""
        for handoff in self._handoffs.of_engine(incarnation):
            self._transfers.withdraw(handoff)

    def engine_left(self, engine: Engine, detail: str, now: Instant) -> None:
        """Its memory may still be read until the last write is terminal."""
        fault = Fault(Reason.ENGINE_GONE, f"engine {engine.engine_id}: {detail}")
        for handoff in self._handoffs.of_engine(engine.incarnation):
            self._transfers.end(handoff, fault, now)
        for target in self._targets.waiting_for_engine(engine.incarnation):
            self._transfers.end_target(target, fault, now)
        self._receivers.forget_engine(engine.incarnation)

    # --- from the receivers ------------------------------------------------------------------------------

    def described(self, event: Described) -> None:
        """A receiving engine presents itself; it is told whether its KV and ours fit."""
        fault = self._receivers.describe(event.link, event.receiver, event.sender_engine_id)
        reached = Reached(event.link, event.receiver.incarnation, event.sender_engine_id, fault)
        self._out.say(SayReached(reached))

    def announced(self, event: Announced, now: Instant) -> None:
        """A reservation wants KV of ours."""
        key = (event.link, event.incarnation, event.key)
        if self._targets.get(key) is not None:
            return
        ended = self._transfers.gone.dig(key)
        if ended is not None:
            # Said twice; or its receiver's node forgets sooner than this one, and waits for an answer.
            self._out.say(SayPeer(PeerEnded(*key, ended, fenced=True)))
            return
        fit = self._receivers.fit((event.link, event.incarnation), event.sender_engine_id)
        target = fit if isinstance(fit, Fault) else self._admit(event, fit, now)
        if isinstance(target, Fault):
            self._transfers.gone.bury(key, target, now)
            self._out.say(SayPeer(PeerEnded(*key, target, fenced=True)))
            return
        self._targets.add(target)
        current = self._handoffs.current(target.transfer)
        engine = self._engines.get(target.sender)
        if current is not None and engine is not None:
            self._transfers.attach(target, current, now)
            self._transfers.go_on(current, engine, now)

    def _admit(self, event: Announced, fit: Fit, now: Instant) -> Target | Fault:
        transfer = (fit.engine.incarnation, event.key.transfer_id)
        over = self._transfers.over.dig(transfer)
        if over is not None:
            return over
        if self.draining and self._handoffs.current(transfer) is None:
            return Fault(Reason.DRAINING, "the sending node drains")
        many = self._targets.count((event.link, event.incarnation))
        if many >= self._limits.halves_per_engine:
            return Fault(Reason.OVER_LIMIT, f"engine {fit.view.engine_id} has announced {many} reservations")
        too_much = None if is_local(event.link) else self._too_much(event)
        if too_much is not None:
            return too_much
        try:
            for layout in fit.view.pools.values():
                check_blocks(layout, event.blocks, event.start, event.end)
            lanes = lanes_between(fit.pairs, event.start, event.end)
        except Refused as error:
            return error.fault()
        return Target(event, fit.view, fit.engine.incarnation, lanes, times=Times(opened=now))

    def _too_much(self, event: Announced) -> Fault | None:
        """What other nodes announce costs memory here, whatever engines they say that it is for."""
        held = self._targets.on(event.link)
        if held.halves >= self._limits.halves_per_link:
            return Fault(Reason.OVER_LIMIT, f"{held.halves} reservations are announced on this link")
        blocks = held.blocks + sum(len(listed.ids) for listed in event.blocks)
        if blocks > self._limits.blocks_per_link:
            return Fault(Reason.OVER_LIMIT, f"reservations on this link would name {blocks} blocks")
        return None

    def withdrawn(self, event: Withdrawn, now: Instant) -> None:
        """The receiver wants nothing (any more): the blocks can go as soon as nothing reads them."""
        if event.incarnation is not None:
            # Where none is there, nothing is to be said: its receiver has been told how it ended.
            target = self._targets.get((event.link, event.incarnation, event.key))
            if target is not None and target.live:
                self._transfers.drop(target, event.fault, now)
            return
        engine = self._engines.named(event.sender_engine_id)
        if engine is None:
            return
        transfer = (engine.incarnation, event.key.transfer_id)
        current = self._handoffs.current(transfer)
        if self._targets.waiting_for(transfer):
            return  # who wants it says so on a link of its own: this word is about somebody else's wish
        if current is None:
            self._transfers.finish(transfer, as_peers_see(event.fault), now)
        elif not current.targets:
            self._transfers.end(current, as_peers_see(event.fault), now)

    def receiver_gone(self, event: ReceiverGone, now: Instant) -> None:
        """A receiving engine, or the inlets that received for it, are no more."""
        fault = Fault(Reason.ENGINE_GONE, event.detail or "the receiving engine left")
        self._forget((event.link, event.incarnation), fault, now)

    def receiver_lost(self, event: ReceiverLost, now: Instant) -> None:
        """The link broke: its receivers have ended their reservations, and fence for themselves."""
        for receiver in self._receivers.on(event.link):
            self._forget(receiver, Fault(Reason.PEER_UNREACHABLE, event.detail), now)
        self._transfers.link_lost(event.link)

    def _forget(self, receiver: ReceiverKey, fault: Fault, now: Instant) -> None:
        """Ends all that a receiver wants, and the way to it with the last write."""
        if not self._receivers.forget(receiver):
            return
        for target in self._targets.of_receiver(receiver):
            target.orphaned = True
            if target.live:
                self._transfers.drop(target, fault, now)
            self._transfers.bury(target, now)
        if not is_local(receiver[0]):
            self._out.say(CloseOutlet(*receiver))

    # --- from the node -----------------------------------------------------------------------------------

    def write_ended(self, event: WriteEnded, now: Instant) -> None:
        """A write is terminal."""
        self._transfers.write_ended(event, now)

    def pump(self, now: Instant) -> None:
        """Posts what the schedule lets go."""
        self._transfers.pump(now)

    def tick(self, now: Instant) -> None:
        """Leases of handoffs that nobody came for, and writes that nothing is heard of."""
        for handoff in self._handoffs.expired(now):
            fault = Fault(Reason.EXPIRED, "no reservation came within the lease")
            self._transfers.end(handoff, fault, now)
        self._transfers.tick(now)
        self._early.sweep(now)
        self._cancelled_early.sweep(now)

    def forget(self, incarnation: Incarnation) -> None:
        """Nothing comes of an engine any more."""
        self._transfers.forget(incarnation)
        self._early.forget(incarnation)
        self._cancelled_early.forget(incarnation)

    # --- what is held ------------------------------------------------------------------------------------

    def halves(self) -> list[tuple[Handoff, list[Target]]]:
        """All handoffs with their targets, oldest first of each engine."""
        return [(handoff, self._targets.these(handoff.targets)) for handoff in self._handoffs]

    def rate(self, link: LinkId) -> float:
        """Bytes per second of a link; 0 = not known."""
        return self._transfers.rate(link)

    def announced_by(self, link: LinkId) -> int:
        """Reservations of a link that are held, those too that no handoff fills yet."""
        return self._targets.on(link).halves

    @property
    def writes(self) -> int:
        """Writes that are not terminal."""
        return self._transfers.writes

    @property
    def idle(self) -> bool:
        """No handoff is held, and nothing is written."""
        return not len(self._handoffs) and not self.writes

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether a handoff of the engine is left, i.e. whether its memory may still be read."""
        return self._handoffs.count(incarnation) > 0


def _note_completion(handoff: Handoff, now: Instant) -> None:
    if handoff.complete and not handoff.sealed_at:
        handoff.sealed_at = handoff.advanced_at or now
        handoff.times = replace(handoff.times, sealed=handoff.sealed_at)


def _wrong_blocks(event: HandedOff, engine: Engine) -> Fault | None:
    try:
        for layout in engine.pools.values():
            check_blocks(layout, event.blocks)
    except Refused as error:
        return error.fault()
    return None


def _append(handoff: Handoff, event: HandedOff, engine: Engine) -> Fault | None:
    wrong = handoff.append(event.blocks, next(iter(engine.pools.values())))
    return Fault(Reason.INVALID, wrong) if wrong is not None else None
