# SPDX-License-Identifier: Apache-2.0
"""The sending side: handoffs, the targets that they fill, and the writes between them.

A handoff and a target find each other by transfer_id, whichever comes first. From then on every write is
a window between what was posted and the frontier. A handoff ends well when every rank of its receiver has
all that it asked for, else with the first fault; the engine hears of it once nothing reads its blocks any
more, i.e. once every write of it is terminal, the failed ones' siblings included.
"""

from __future__ import annotations

from dataclasses import replace

from kvpush_client.events import Fault, Reason, Side
from kvpushd.core.engines import Engine, Engines, Limits, is_local
from kvpushd.core.lane import Frontier
from kvpushd.core.layout import check_blocks
from kvpushd.core.match import coverage_fault, lanes_between, verify
from kvpushd.core.messages import (
    Account,
    Advanced,
    Announced,
    Cancelled,
    CloseOutlet,
    Described,
    HandedOff,
    Incarnation,
    Instant,
    Instruction,
    LinkId,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    Reached,
    ReceiverGone,
    ReceiverLost,
    ReceiverView,
    SayPeer,
    SayReached,
    TellHandoffEnded,
    TellMatched,
    TellRejected,
    Times,
    Withdrawn,
    WriteEnded,
)
from kvpushd.core.target import HalfKey, Handoff, Target, TargetKey, add
from kvpushd.core.tombs import Tombs
from kvpushd.core.writer import Writer
from kvpushd.errors import Refused


class Sender:
    """All handoffs of the node's engines. Events in, instructions out; see Ledger."""

    def __init__(self, engines: Engines, limits: Limits) -> None:
        self._engines = engines
        self._limits = limits
        self._handoffs: dict[HalfKey, Handoff] = {}
        self._current: dict[tuple[Incarnation, bytes], HalfKey] = {}
        """The handoff of a transfer's latest attempt."""
        self._targets: dict[TargetKey, Target] = {}
        self._receivers: dict[tuple[LinkId, Incarnation], ReceiverView] = {}
        self._verified: dict[tuple[LinkId, Incarnation, str], Incarnation] = {}
        """For which incarnation of the sending engine a receiver was found to fit."""
        self._writer = Writer(limits)
        self._early: dict[HalfKey, tuple[Instant, list[Advanced]]] = {}
        """Workers may be heard before their scheduler."""
        self._ended: Tombs[HalfKey] = Tombs(limits.lease, limits.tombs)
        self._cancelled_early: Tombs[HalfKey] = Tombs(limits.lease, limits.tombs)
        self._transfers: Tombs[tuple[Incarnation, bytes]] = Tombs(limits.lease, limits.tombs)
        self._out: list[Instruction] = []
        self.draining = False

    # --- from the engine ---------------------------------------------------------------------------------

    def handed_off(self, event: HandedOff, now: Instant) -> None:
        """Opens a handoff, appends to it, seals it."""
        key = (event.incarnation, event.key)
        engine = self._engines.get(event.incarnation)
        if engine is None or engine.left:
            return
        handoff = self._handoffs.get(key)
        if handoff is None:
            if self._ended.dig(key) is not None:
                return
            handoff = self._open(event, engine, now)
            if handoff is None:
                return
        if handoff.fault is not None:
            return
        fault = self._append(handoff, event, engine)
        if fault is not None:
            self._out.append(TellRejected(event.incarnation, event.key, Side.SENDER, fault))
            return
        if event.seal is not None and handoff.seal is None:
            self._seal(handoff, event.seal, now)
        self._settle(handoff, now)

    def _open(self, event: HandedOff, engine: Engine, now: Instant) -> Handoff | None:
        key = (event.incarnation, event.key)
        transfer = (event.incarnation, event.key.transfer_id)
        current = self._current.get(transfer)
        if current is not None and current[1].attempt > event.key.attempt:
            stale = Fault(Reason.STALE_ATTEMPT, f"attempt {current[1].attempt} of this transfer is open")
            self._out.append(TellRejected(event.incarnation, event.key, Side.SENDER, stale))
            return None
        handoff = Handoff(
            incarnation=event.incarnation,
            engine_id=engine.engine_id,
            key=event.key,
            label=event.label,
            receiver_engine_id=event.receiver_engine_id,
            lease=self._limits.lease if event.lease is None else event.lease,
            frontiers={rank: Frontier.at_start(len(pool.layers)) for rank, pool in engine.pools.items()},
            times=Times(opened=now),
        )
        self._handoffs[key] = handoff
        mine = sum(1 for owner, _ in self._handoffs if owner == event.incarnation)
        fault: Fault | None = self._cancelled_early.dig(key) or self._transfers.dig(transfer)
        if fault is None and self.draining:
            fault = Fault(Reason.DRAINING, "this node drains and takes no new handoffs")
        if fault is None and mine > self._limits.halves_per_engine:
            fault = Fault(Reason.OVER_LIMIT, f"engine {engine.engine_id} has {mine - 1} handoffs already")
        if fault is None and not engine.ready:
            fault = Fault(
                Reason.NO_SUCH_ENGINE, f"engine {engine.engine_id} has not registered all of its pools"
            )
        if fault is not None:
            self._end(handoff, fault, now)
            return None
        self._current[transfer] = key
        if current is not None:
            self._supersede(self._handoffs[current], handoff, now)
        for target in list(self._targets.values()):
            if target.handoff is None and target.fault is None and self._wants(target, handoff):
                self._attach(target, handoff, now)
        for early in self._early.pop(key, (0, []))[1]:
            self.advanced(early, now)
        return handoff

    def _supersede(self, old: Handoff, new: Handoff, now: Instant) -> None:
        """A new attempt takes the targets over; it writes once the old one's writes are terminal."""
        for key in old.targets:
            target = self._targets[key]
            target.handoff = (new.incarnation, new.key)
            target.restart()
            new.targets.add(key)
        old.targets.clear()
        new.times = replace(new.times, matched=old.times.matched)
        self._end(old, Fault(Reason.CANCELLED, f"attempt {new.key.attempt} took over"), now)

    def _append(self, handoff: Handoff, event: HandedOff, engine: Engine) -> Fault | None:
        layout = next(iter(engine.pools.values()))
        try:
            check_blocks(layout, event.blocks)
        except Refused as error:
            return error.fault()
        for blocks in event.blocks:
            wrong = handoff.append(blocks, layout.groups[blocks.group])
            if wrong is not None:
                return Fault(Reason.INVALID, wrong)
        return None

    def _seal(self, handoff: Handoff, seal: int, now: Instant) -> None:
        handoff.seal = seal
        if not handoff.targets:
            handoff.deadline = now + handoff.lease
        self._note_completion(handoff, now)
        for key in list(handoff.targets):
            self._check_coverage(self._targets[key], handoff, now)
        self._unpin(handoff.incarnation, now)

    def advanced(self, event: Advanced, now: Instant) -> None:
        """A worker says how far a handoff is final in its pool."""
        key = (event.incarnation, event.key)
        handoff = self._handoffs.get(key)
        if handoff is None:
            engine = self._engines.get(event.incarnation)
            known = engine is not None and not engine.left and self._ended.dig(key) is None
            if known and len(self._early) < self._limits.halves_per_engine:
                self._early.setdefault(key, (now, []))[1].append(event)
            return
        frontier = handoff.frontiers.get(event.rank)
        if frontier is None or handoff.fault is not None:
            return
        frontier.advance(event.positions, event.first_layer, event.end_layer)
        self._note_completion(handoff, event.at or now)

    def _note_completion(self, handoff: Handoff, at: Instant) -> None:
        if handoff.complete and not handoff.sealed_at:
            handoff.sealed_at = at
            handoff.times = replace(handoff.times, sealed=at)

    def cancelled(self, event: Cancelled, now: Instant) -> None:
        """The engine takes a handoff back; one that is not known yet will end as it comes."""
        key = (event.incarnation, event.key)
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._cancelled_early.bury(key, Fault(Reason.CANCELLED, event.detail), now)
        else:
            self._end(handoff, Fault(Reason.CANCELLED, event.detail), now)

    def engine_left(self, engine: Engine, detail: str, now: Instant) -> None:
        """Its memory may still be read until the last write is terminal."""
        fault = Fault(Reason.ENGINE_GONE, f"engine {engine.engine_id}: {detail}")
        for handoff in self._of_engine(engine.incarnation):
            self._end(handoff, fault, now)
        for target in list(self._targets.values()):
            if target.handoff is None and target.said.sender_engine_id == engine.engine_id:
                self._end_target(target, fault)

    # --- from the receivers ------------------------------------------------------------------------------

    def described(self, event: Described) -> None:
        """A receiving engine presents itself; it is told whether its KV and ours fit."""
        fault = self._verify(event.link, event.receiver, event.sender_engine_id)
        if fault is None:
            self._receivers[event.link, event.receiver.incarnation] = event.receiver
        reached = Reached(event.link, event.receiver.incarnation, event.sender_engine_id, fault)
        self._out.append(SayReached(reached))

    def _verify(self, link: LinkId, receiver: ReceiverView, sender_engine_id: str) -> Fault | None:
        engine = self._engines.named(sender_engine_id)
        if engine is None or not engine.ready:
            return Fault(Reason.NO_SUCH_ENGINE, f"no engine {sender_engine_id!r} is registered on this node")
        done = self._verified.get((link, receiver.incarnation, sender_engine_id))
        if done != engine.incarnation:
            try:
                verify(engine, receiver)
            except Refused as error:
                return error.fault()
            self._verified[link, receiver.incarnation, sender_engine_id] = engine.incarnation
        return None

    def announced(self, event: Announced, now: Instant) -> None:
        """A reservation wants KV of ours."""
        key = (event.link, event.incarnation, event.key)
        if key in self._targets:
            return
        target, fault = self._admit(event, now)
        if fault is not None:
            self._out.append(SayPeer(PeerEnded(event.link, event.incarnation, event.key, fault, fenced=True)))
            return
        assert target is not None
        self._targets[key] = target
        engine = self._engines.named(event.sender_engine_id)
        assert engine is not None
        current = self._current.get((engine.incarnation, event.key.transfer_id))
        if current is not None:
            self._attach(target, self._handoffs[current], now)

    def _admit(self, event: Announced, now: Instant) -> tuple[Target | None, Fault | None]:
        receiver = self._receivers.get((event.link, event.incarnation))
        if receiver is None:
            return None, Fault(
                Reason.STALE_INCARNATION, "the receiving engine was not described on this link"
            )
        fault = self._verify(event.link, receiver, event.sender_engine_id)
        if fault is not None:
            return None, fault
        engine = self._engines.named(event.sender_engine_id)
        assert engine is not None
        transfer = (engine.incarnation, event.key.transfer_id)
        fault = self._transfers.dig(transfer)
        if fault is None and self.draining and transfer not in self._current:
            fault = Fault(Reason.DRAINING, "the sending node drains")
        if fault is not None:
            return None, fault
        current = self._current.get(transfer)
        if current is not None:
            fault = self._refusal(self._handoffs[current], receiver)
        elif (
            sum(1 for t in self._targets if t[:2] == (event.link, event.incarnation))
            >= self._limits.halves_per_engine
        ):
            fault = Fault(
                Reason.OVER_LIMIT, f"engine {receiver.engine_id} has announced too many reservations"
            )
        if fault is not None:
            return None, fault
        try:
            for layout in receiver.pools.values():
                check_blocks(layout, event.blocks, event.start, event.end)
            lanes = lanes_between(engine, receiver, event.start, event.end)
        except Refused as error:
            return None, error.fault()
        return Target(event, receiver, lanes, times=Times(opened=now)), None

    def _refusal(self, handoff: Handoff, receiver: ReceiverView) -> Fault | None:
        """A half matches only a half that names its engine; and only one engine may receive a transfer."""
        wanted = handoff.receiver_engine_id
        if wanted and wanted != receiver.engine_id:
            return Fault(Reason.FORBIDDEN, "the handoff names another receiver")
        for key in handoff.targets:
            if self._targets[key].receiver.engine_id != receiver.engine_id:
                return Fault(Reason.DUPLICATE, "another engine receives this transfer")
        return None

    def _wants(self, target: Target, handoff: Handoff) -> bool:
        return (
            target.said.key.transfer_id == handoff.key.transfer_id
            and target.said.sender_engine_id == handoff.engine_id
        )

    def _attach(self, target: Target, handoff: Handoff, now: Instant) -> None:
        fault = self._refusal(handoff, target.receiver)
        if fault is not None:
            self._end_target(target, fault)
            return
        target.handoff = (handoff.incarnation, handoff.key)
        target.times = replace(target.times, matched=now)
        handoff.targets.add(target.key)
        handoff.deadline = None
        if not handoff.times.matched:
            handoff.times = replace(handoff.times, matched=now)
        link, incarnation, key = target.key
        self._out.append(SayPeer(PeerMatched(link, incarnation, key)))
        self._out.append(TellMatched(handoff.incarnation, handoff.key, Side.SENDER))
        self._check_coverage(target, handoff, now)

    def _check_coverage(self, target: Target, handoff: Handoff, now: Instant) -> None:
        """Once sealed, what the receiver needs must have been named."""
        if handoff.seal is None or target.fault is not None or handoff.fault is not None:
            return
        engine = self._engines.get(handoff.incarnation)
        fault = coverage_fault(target, handoff, engine) if engine else None
        if fault is not None:
            self._end(handoff, fault, now)

    def withdrawn(self, event: Withdrawn, now: Instant) -> None:
        """The receiver wants nothing (any more): the blocks can go as soon as nothing reads them."""
        engine = self._engines.named(event.sender_engine_id)
        if event.incarnation is not None:
            target = self._targets.get((event.link, event.incarnation, event.key))
            if target is None:
                gone = PeerEnded(event.link, event.incarnation, event.key, event.fault, fenced=True)
                self._out.append(SayPeer(gone))
                return
            if target.fault is None and not target.landed:
                self._drop(target, event.fault, now)
        elif engine is not None:
            current = self._current.get((engine.incarnation, event.key.transfer_id))
            if current is not None and not self._handoffs[current].targets:
                self._end(self._handoffs[current], event.fault, now)
        if engine is not None:
            transfer = (engine.incarnation, event.key.transfer_id)
            if transfer not in self._current:
                self._transfers.bury(transfer, event.fault, now)

    def _drop(self, target: Target, fault: Fault, now: Instant) -> None:
        """Ends a target that its receiver gave up, and with it the handoff: nobody else waits for it."""
        handoff = self._handoffs.get(target.handoff) if target.handoff else None
        if handoff is None:
            self._end_target(target, fault)
            return
        reason = Reason.PEER_CANCELLED if fault.reason is Reason.CANCELLED else fault.reason
        self._end(handoff, Fault(reason, fault.detail), now)

    def receiver_gone(self, event: ReceiverGone, now: Instant) -> None:
        """A receiving engine, or the inlets that received for it, are no more."""
        fault = Fault(Reason.ENGINE_GONE, event.detail or "the receiving engine left")
        for target in list(self._targets.values()):
            if (
                target.key[:2] == (event.link, event.incarnation)
                and not target.landed
                and target.fault is None
            ):
                self._drop(target, fault, now)
        self._forget_receiver((event.link, event.incarnation))

    def receiver_lost(self, event: ReceiverLost, now: Instant) -> None:
        """The link broke: its receivers have ended their reservations, and fence for themselves."""
        for link, incarnation in [key for key in self._receivers if key[0] == event.link]:
            for target in list(self._targets.values()):
                if target.key[:2] == (link, incarnation) and not target.landed and target.fault is None:
                    self._drop(target, Fault(Reason.PEER_UNREACHABLE, event.detail), now)
            self._forget_receiver((link, incarnation))

    def _forget_receiver(self, receiver: tuple[LinkId, Incarnation]) -> None:
        """Forgets the way to a receiver with its last write."""
        if receiver in self._receivers:
            del self._receivers[receiver]
            for key in [key for key in self._verified if key[:2] == receiver]:
                del self._verified[key]
            if not is_local(receiver[0]):
                self._out.append(CloseOutlet(*receiver))

    # --- writes ------------------------------------------------------------------------------------------

    def pump(self, now: Instant) -> None:
        """Posts what the schedule lets go, and notes what has become complete."""
        for target in self._writer.order(self._fillable(), now):
            assert target.handoff is not None
            handoff = self._handoffs[target.handoff]
            engine = self._engines.get(handoff.incarnation)
            if engine is None or not engine.ready:
                continue
            for post in self._writer.cut(target, handoff, engine):
                if not target.times.first_post:
                    target.times = replace(target.times, first_post=now)
                    self._out.append(SayPeer(PeerMoving(*target.key)))
                self._out.append(post)
            self._note_landed(target, handoff, now)

    def _fillable(self) -> list[Target]:
        return [
            t for t in self._targets.values() if t.handoff is not None and t.fault is None and not t.landed
        ]

    def write_ended(self, event: WriteEnded, now: Instant) -> None:
        """A write is terminal. If it failed, so does its transfer; its siblings read on till they end."""
        write = self._writer.ended(event.write)
        if write is None:
            return
        target, handoff = write.target, self._handoffs.get(write.handoff)
        current = target.handoff == write.handoff
        if event.fault is None and current:
            target.wrote(event.bytes, event.runs, event.ended or now)
        if event.fault is not None:
            # In this process a copy is over when it has failed; on a link, see Target.tainted.
            target.tainted |= not is_local(target.said.link)
            # Also where a former attempt's write failed: it might yet land on top of this one's.
            filled_by = self._handoffs.get(target.handoff) if target.handoff else None
            if filled_by is not None and not target.landed:
                self._end(filled_by, event.fault, now)
        if target.fault is not None and not target.in_flight and target.key in self._targets:
            del self._targets[target.key]
            if not target.tainted:
                self._out.append(SayPeer(PeerFenced(*target.key)))
        if handoff is not None:
            self._settle(handoff, now)

    def _note_landed(self, target: Target, handoff: Handoff, now: Instant) -> None:
        if not target.done or target.landed:
            return
        target.landed = True
        before = [at for at in target.landed_at if not handoff.sealed_at or at < handoff.sealed_at]
        target.counts = replace(target.counts, chunks_before_seal=len(before))
        landed = max(target.landed_at, default=now)
        target.times = replace(target.times, landed=landed, sealed=handoff.sealed_at)
        handoff.times = replace(
            handoff.times,
            first_post=handoff.times.first_post or target.times.first_post,
            first_landed=handoff.times.first_landed or target.times.first_landed,
            landed=landed,
        )
        handoff.counts = add(handoff.counts, target.counts)
        self._out.append(SayPeer(PeerLanded(*target.key, target.counts, target.times)))
        self._settle(handoff, now)

    # --- ends --------------------------------------------------------------------------------------------

    def _end(self, handoff: Handoff, fault: Fault, now: Instant) -> None:
        """Ends a handoff with a fault, unless it has one, and all targets that it fills."""
        if handoff.fault is None:
            handoff.fault = fault
            for key in list(handoff.targets):
                target = self._targets.get(key)
                if target is not None and not target.landed:
                    self._end_target(target, _as_peers_see(fault))
        self._settle(handoff, now)

    def _end_target(self, target: Target, fault: Fault) -> None:
        if target.fault is not None:
            return
        target.fault = fault
        if not target.in_flight:
            del self._targets[target.key]
        fenced = not target.in_flight and not target.tainted
        self._out.append(SayPeer(PeerEnded(*target.key, fault, fenced)))

    def _settle(self, handoff: Handoff, now: Instant) -> None:
        """Ends a handoff whose receivers have all they need; forgets one that nothing reads any more."""
        key = (handoff.incarnation, handoff.key)
        if self._handoffs.get(key) is not handoff:
            return
        if self._writer.reading(key) or (handoff.fault is None and not self._satisfied(handoff)):
            return
        del self._handoffs[key]
        transfer = (handoff.incarnation, handoff.key.transfer_id)
        fault = handoff.fault or Fault(Reason.DUPLICATE, "this transfer has landed already")
        self._ended.bury(key, fault, now)
        if self._current.get(transfer) == key:
            del self._current[transfer]
            self._transfers.bury(transfer, _as_peers_see(fault), now)
        self._out.append(self._account(handoff, now))
        for target in handoff.targets:
            found = self._targets.get(target)
            if found is not None and found.landed:
                del self._targets[target]
        if self._lives(handoff):
            self._out.append(
                TellHandoffEnded(handoff.incarnation, handoff.key, handoff.fault, handoff.counts)
            )

    def _satisfied(self, handoff: Handoff) -> bool:
        targets = [self._targets[key] for key in handoff.targets]
        if handoff.seal is None or not targets or not all(t.landed for t in targets):
            return False
        return sum(len(t.receiver.pools) for t in targets) >= targets[0].receiver.world_size

    def tick(self, now: Instant) -> None:
        """Leases of handoffs that nobody came for."""
        for handoff in list(self._handoffs.values()):
            waits = handoff.fault is None and not handoff.targets and handoff.deadline is not None
            if waits and now >= (handoff.deadline or 0):
                self._end(handoff, Fault(Reason.EXPIRED, "no reservation came within the lease"), now)
        for key in [key for key, (since, _) in self._early.items() if since + self._limits.lease <= now]:
            del self._early[key]
        for tombs in (self._ended, self._cancelled_early, self._transfers):
            tombs.sweep(now)

    def _unpin(self, incarnation: Incarnation, now: Instant) -> None:
        """Lets go of the oldest handoffs that nobody came for, when they pin too much of the engine's KV:
        otherwise it could lack the room to prefill what its receivers do wait for."""
        engine = self._engines.get(incarnation)
        if engine is None:
            return
        waiting = [h for h in self._of_engine(incarnation) if h.deadline is not None and h.fault is None]
        pinned = sum(h.block_count for h in waiting)
        most = engine.blocks * self._limits.pinned_share
        for handoff in waiting:
            if pinned <= most:
                break
            pinned -= handoff.block_count
            detail = (
                f"unmatched handoffs pinned more than {self._limits.pinned_share:.0%} of the engine's blocks"
            )
            self._end(handoff, Fault(Reason.OVER_LIMIT, detail), now)

    # --- what is held ------------------------------------------------------------------------------------

    def take(self) -> list[Instruction]:
        """The instructions since the last call."""
        out, self._out = self._out, []
        return out

    def halves(self) -> list[tuple[Handoff, list[Target]]]:
        """All handoffs with their targets, oldest first."""
        return [
            (h, [self._targets[k] for k in h.targets if k in self._targets]) for h in self._handoffs.values()
        ]

    @property
    def writes(self) -> int:
        """Writes that are not terminal."""
        return len(self._writer)

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether a handoff of the engine is left, i.e. whether its memory may still be read."""
        return any(owner == incarnation for owner, _ in self._handoffs)

    def _of_engine(self, incarnation: Incarnation) -> list[Handoff]:
        return [handoff for (owner, _), handoff in self._handoffs.items() if owner == incarnation]

    def _lives(self, handoff: Handoff) -> bool:
        engine = self._engines.get(handoff.incarnation)
        return engine is not None and not engine.left

    def _account(self, handoff: Handoff, now: Instant) -> Account:
        receivers = sorted(
            {(self._targets[k].receiver.engine_id, k[0]) for k in handoff.targets if k in self._targets}
        )
        return Account(
            side=Side.SENDER,
            incarnation=handoff.incarnation,
            engine_id=handoff.engine_id,
            key=handoff.key,
            other=", ".join(name if is_local(link) else f"{name}@{link}" for name, link in receivers),
            label=handoff.label,
            start=min((b.start for b in handoff.blocks.values()), default=0),
            end=handoff.seal or 0,
            blocks=handoff.block_count,
            times=replace(handoff.times, ended=now),
            sender_times=Times(),
            counts=handoff.counts,
            fault=handoff.fault,
        )


def _as_peers_see(fault: Fault) -> Fault:
    """What the other side of a transfer is told of a fault of this one."""
    return Fault(Reason.PEER_CANCELLED, fault.detail) if fault.reason is Reason.CANCELLED else fault
