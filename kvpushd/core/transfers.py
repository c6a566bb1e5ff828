# SPDX-License-Identifier: Apache-2.0
"""Handoffs and the targets that they fill, together: how they meet, move and end.

From their meeting on every write is a window between what was posted and the frontier. A handoff ends well
when every rank of its receiver has all that it asked for, else with the first fault; the engine hears of it
once nothing reads its blocks any more, i.e. once every write of it is terminal, the failed ones' siblings
included.

With the end of its handoff, unless a later attempt took over, a transfer is over: what comes late for it,
on either side, ends with the same fault.
"""

from __future__ import annotations

from dataclasses import replace

from kvpush_client.events import Fault, Reason, Side
from kvpushd.core.engines import Engine, Engines, Limits, is_local
from kvpushd.core.events import PeerEnded, PeerFenced, PeerLanded, PeerMatched, PeerMoving, WriteEnded
from kvpushd.core.handoff import Handoff, add
from kvpushd.core.handoffs import Handoffs
from kvpushd.core.instructions import SayPeer, TellHandoffEnded, TellMatched
from kvpushd.core.match import coverage_fault, prompt_fault
from kvpushd.core.outbox import Outbox
from kvpushd.core.target import Target, everybody
from kvpushd.core.targets import Targets
from kvpushd.core.tombs import Tombs
from kvpushd.core.words import SECOND, HalfKey, Incarnation, Instant, LinkId, TargetKey, Transfer
from kvpushd.core.writer import Writer

LANDED = Fault(Reason.DUPLICATE, "this transfer has landed already")
"""Says who comes again for what was there."""


class Transfers:
    """The sending side's state, and every change of it that is not one event's alone."""

    def __init__(self, engines: Engines, limits: Limits, out: Outbox) -> None:
        self._engines = engines
        self._limits = limits
        self._out = out
        self._writer = Writer(limits)
        self.handoffs = Handoffs()
        self.targets = Targets()
        self.ended: Tombs[HalfKey] = Tombs(limits.lease, limits.tombs_per_engine)
        self.over: Tombs[Transfer] = Tombs(limits.lease, limits.tombs_per_engine)
        self.gone: Tombs[TargetKey] = Tombs(limits.lease, limits.tombs_per_link)

    # --- meeting -----------------------------------------------------------------------------------------

    def attach(self, target: Target, handoff: Handoff, now: Instant) -> None:
        """A target has found its handoff; whether that names what is wanted is for `go_on` to see."""
        fault = self._mismatch(target, handoff)
        if fault is not None:
            self.end_target(target, fault, now)
            return
        self.targets.settle(target)
        target.handoff = handoff.half
        target.times = replace(target.times, matched=now)
        handoff.targets.append(target.key)
        handoff.receivers.add((target.receiver.engine_id, target.said.link))
        self._out.say(SayPeer(PeerMatched(*target.key)))
        self._note_match(handoff, now)

    def _mismatch(self, target: Target, handoff: Handoff) -> Fault | None:
        """A half matches only a half that names its engine; and only one engine may receive a transfer."""
        wanted, is_for = handoff.receiver_engine_id, target.receiver.engine_id
        if wanted and wanted != is_for:
            return Fault(Reason.FORBIDDEN, "the handoff names another receiver")
        if any(other.receiver.engine_id != is_for for other in self.targets.these(handoff.targets)):
            return Fault(Reason.DUPLICATE, "another engine receives this transfer")
        return None

    def take_over(self, old: Handoff, new: Handoff, now: Instant) -> None:
        """A new attempt fills the targets of the old one, once the old one's writes are terminal."""
        for target in self.targets.these(old.targets):
            target.handoff = new.half
            new.targets.append(target.key)
            if not target.landed:
                self._writer.withdraw(target)
                target.restart()
        old.targets.clear()
        new.receivers = set(old.receivers)
        new.counts = old.counts
        new.moved = old.moved.copy()
        self._note_match(new, now)
        self.end(old, Fault(Reason.CANCELLED, f"attempt {new.key.attempt} took over"), now)

    def _note_match(self, handoff: Handoff, now: Instant) -> None:
        """With the last rank of its receiver its lease stops."""
        if handoff.times.matched or not everybody(self.targets.these(handoff.targets)):
            return
        self.handoffs.keep(handoff)
        handoff.times = replace(handoff.times, matched=now)
        self._out.say(TellMatched(handoff.incarnation, handoff.key, Side.SENDER))

    def lend(self, handoff: Handoff, deadline: Instant, now: Instant) -> None:
        """Lets an unmatched handoff wait; but those of an engine must not pin too much of its KV, else it
        could lack the room to prefill what its receivers do wait for: the oldest go first, never the last
        that came, whose receiver may be on its way."""
        self.handoffs.lend(handoff, deadline)
        engine = self._engines.get(handoff.incarnation)
        most = engine.blocks * self._limits.pinned_share if engine is not None else 0
        while self.handoffs.pinned(handoff.incarnation) > most:
            share = f"{self._limits.pinned_share:.0%}"
            fault = Fault(Reason.OVER_LIMIT, f"unmatched handoffs pinned over {share} of the engine's blocks")
            oldest = self.handoffs.oldest_pinning(handoff.incarnation)
            if oldest is handoff:
                break
            self.end(oldest, fault, now)

    # --- moving ------------------------------------------------------------------------------------------

    def offer(self, handoff: Handoff, engine: Engine) -> None:
        """Puts in line what a handoff has to write now."""
        for target in self.targets.these(handoff.targets):
            self._writer.offer(target, handoff, engine)

    def more(self, handoff: Handoff, engine: Engine) -> None:
        """The same where more than before is final."""
        for target in self.targets.these(handoff.targets):
            self._writer.more(target, handoff, engine)

    def withdraw(self, handoff: Handoff) -> None:
        """Nothing of it can be written for now."""
        for target in self.targets.these(handoff.targets):
            self._writer.withdraw(target)

    def go_on(self, handoff: Handoff, engine: Engine, now: Instant) -> None:
        """Does what follows from what a handoff names, and from who wants it."""
        targets = [target for target in self.targets.these(handoff.targets) if target.live]
        for target in targets:
            if handoff.fault is not None:
                break
            fault = prompt_fault(target, handoff) or coverage_fault(target, handoff, engine)
            if fault is not None:
                self.end(handoff, fault, now)
        for target in targets:
            if target.live:
                self._writer.offer(target, handoff, engine)
                self._note_landed(target, handoff, now)
        self.settle(handoff, now)

    def pump(self, now: Instant) -> None:
        """Posts what the schedule lets go."""
        while (key := self._writer.turn(now)) is not None:
            target = self.targets.get(key)
            handoff = self.handoffs.get(target.handoff) if target is not None else None
            engine = self._engines.get(handoff.incarnation) if handoff is not None else None
            assert target is not None, "what is in line is live, and so is all that it needs"
            assert handoff is not None
            assert engine is not None
            post = self._writer.post(target, handoff, engine, now)
            if post is None:
                continue
            if not target.times.first_post:
                target.times = replace(target.times, first_post=now)
                self._out.say(SayPeer(PeerMoving(*target.key)))
            if not handoff.times.first_post:
                handoff.times = replace(handoff.times, first_post=now)
            self._out.say(post)
            self._writer.offer(target, handoff, engine)

    def write_ended(self, event: WriteEnded, now: Instant) -> None:
        """A write is terminal. If it failed, so does its transfer; its siblings read on till they end."""
        write = self._writer.ended(event)
        if write is None:
            return
        target = write.target
        filling = self.handoffs.get(target.handoff)
        if event.fault is not None:
            # In this process a copy is over when it has failed; on a link, see Target.tainted.
            target.tainted |= not is_local(target.said.link)
            # Also where a former attempt's write failed: it might yet land on top of this one's.
            if filling is not None and target.live:
                self.end(filling, event.fault, now)
        elif target.handoff == write.handoff:
            target.wrote(event.bytes, event.runs, event.ended or now)
        self.bury(target, now)
        engine = self._engines.get(filling.incarnation) if filling is not None else None
        if filling is not None and engine is not None and target.live:
            self._writer.offer(target, filling, engine)
            self._note_landed(target, filling, now)
        # Of the attempt that posted it, which need not be the one that fills the target now.
        read = self.handoffs.get(write.handoff)
        if read is not None:
            self.settle(read, now)

    def tick(self, now: Instant) -> None:
        """Ends what a write holds up that has neither landed nor failed within a lease. NIXL may never say
        what became of one, e.g. where the network that carries the bytes is down and the links' is not; the
        blocks stay held until something does. What is old enough is forgotten."""
        for write in self._writer.overdue(now - self._limits.lease):
            filling = self.handoffs.get(write.target.handoff)
            if filling is not None and write.target.live:
                seconds = self._limits.lease / SECOND
                detail = f"a write has neither landed nor failed within {seconds:g} s"
                self.end(filling, Fault(Reason.TRANSPORT_FAILED, detail), now)
        self.ended.sweep(now)
        self.over.sweep(now)
        self.gone.sweep(now)

    def _note_landed(self, target: Target, handoff: Handoff, now: Instant) -> None:
        if not target.live or not target.done:
            return
        target.complete(handoff.sealed_at, now)
        handoff.times = replace(
            handoff.times,
            first_landed=handoff.times.first_landed or target.times.first_landed,
            landed=target.times.landed,
        )
        handoff.counts = add(handoff.counts, target.counts)
        handoff.moved[target.said.link] += target.counts.bytes
        self._out.say(SayPeer(PeerLanded(*target.key, target.counts, target.times)))
        self.settle(handoff, now)

    # --- ending ------------------------------------------------------------------------------------------

    def drop(self, target: Target, fault: Fault, now: Instant) -> None:
        """Ends a target that its receiver gave up, and with it the transfer, unless another engine waits for
        that too: who knows a transfer_id must not end what somebody else has reserved."""
        handoff = self.handoffs.get(target.handoff)
        if handoff is not None:
            self.end(handoff, as_peers_see(fault), now)
            return
        self.end_target(target, fault, now)
        mine = target.receiver.engine_id
        if all(other.receiver.engine_id == mine for other in self.targets.waiting_for(target.transfer)):
            self.finish(target.transfer, as_peers_see(fault), now)

    def end(self, handoff: Handoff, fault: Fault, now: Instant) -> None:
        """Ends a handoff with a fault, unless it has one, and all targets that it fills."""
        if handoff.fault is None:
            handoff.fault, handoff.faulted_at = fault, now
            over = self.handoffs.current(handoff.transfer) in (None, handoff)
            self.handoffs.retire(handoff)
            for target in self.targets.these(handoff.targets):
                self.end_target(target, as_peers_see(fault), now)
            if over:
                self.finish(handoff.transfer, as_peers_see(fault), now)
        self.settle(handoff, now)

    def finish(self, transfer: Transfer, fault: Fault, now: Instant) -> None:
        """A transfer is over: whoever waits for it hears so, and whoever comes late will."""
        self.over.bury(transfer, fault, now)
        for target in self.targets.waiting_for(transfer):
            self.end_target(target, fault, now)

    def end_target(self, target: Target, fault: Fault, now: Instant) -> None:
        """Ends a target, unless it has landed or ended."""
        if not target.live:
            return
        target.fault = fault
        self.targets.settle(target)
        self._writer.withdraw(target)
        self._out.say(SayPeer(PeerEnded(*target.key, fault, target.fenced)))
        if target.fenced:
            self._forget(target, now)

    def bury(self, target: Target, now: Instant) -> None:
        """Of an ended target whose last write is terminal: says so, if not yet said, and lets go of it."""
        if target.fault is None or target.in_flight or self.targets.get(target.key) is not target:
            return
        if not target.tainted:
            self._out.say(SayPeer(PeerFenced(*target.key)))
        # One that can't be vouched for stays as long as it may be asked about.
        if not target.tainted or target.orphaned:
            self._forget(target, now)

    def _forget(self, target: Target, now: Instant) -> None:
        """Lets go of it. Its blocks may be its engine's again: an announcement that comes twice must not open
        it a second time."""
        self.targets.remove(target)
        self.gone.bury(target.key, target.fault or LANDED, now)

    def settle(self, handoff: Handoff, now: Instant) -> None:
        """Ends a handoff whose receivers have all they need; forgets one that nothing reads any more."""
        if self.handoffs.get(handoff.half) is not handoff or self._writer.reading(handoff.half):
            return
        targets = self.targets.these(handoff.targets)
        if handoff.fault is None:
            if handoff.seal is None or not everybody(targets) or not all(t.landed for t in targets):
                return
            self.over.bury(handoff.transfer, LANDED, now)
        self.handoffs.remove(handoff)
        self.ended.bury(handoff.half, handoff.fault or Fault(Reason.UNSPECIFIED, "landed"), now)
        for target in targets:
            if target.landed:
                self._forget(target, now)
        self._out.say(handoff.account(now))
        engine = self._engines.get(handoff.incarnation)
        if engine is not None and not engine.left:
            self._out.say(TellHandoffEnded(handoff.incarnation, handoff.key, handoff.fault, handoff.counts))

    # --- what is held ------------------------------------------------------------------------------------

    def link_lost(self, link: LinkId) -> None:
        """What was learned of a link goes with it, and what ended on it can't come again."""
        self._writer.forget(link)
        self.gone.forget(link)

    def forget(self, incarnation: Incarnation) -> None:
        """Nothing comes of an engine of ours any more."""
        self.ended.forget(incarnation)
        self.over.forget(incarnation)

    def rate(self, link: LinkId) -> float:
        """Bytes per second of a link; 0 = not known."""
        return self._writer.rate(link)

    @property
    def writes(self) -> int:
        """Writes that are not terminal."""
        return len(self._writer)


def as_peers_see(fault: Fault) -> Fault:
    """What the other side of a transfer is told of a fault of this one."""
    return Fault(Reason.PEER_CANCELLED, fault.detail) if fault.reason is Reason.CANCELLED else fault
