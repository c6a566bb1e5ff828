# SPDX-License-Identifier: Apache-2.0
"""The ledger: all halves of a node. Events in, instructions out; no I/O, and no clock of its own.

It is the two sides of a transfer, `Receiver` and `Sender`, over one set of engines. What one says to the
other on the link to oneself (LOCAL) is handled here and never comes out.
"""

from __future__ import annotations

from collections import deque

from kvpush_client.events import Fault, Reason, Side
from kvpushd.core.attention import Attention
from kvpushd.core.engines import Engine, Engines, Limits, is_local
from kvpushd.core.events import (
    Advanced,
    Announced,
    Cancelled,
    Declined,
    Described,
    DrainBegan,
    EngineJoined,
    EngineLeft,
    Event,
    HandedOff,
    InletClosed,
    LinkLost,
    MoverDied,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    PoolMapped,
    Reached,
    ReceiverGone,
    ReceiverLost,
    Reserved,
    Tick,
    Withdrawn,
    WriteEnded,
)
from kvpushd.core.handoff import Handoff
from kvpushd.core.instructions import (
    Instruction,
    LetGo,
    Reach,
    SayAnnounce,
    SayPeer,
    SayReached,
    SayReceiverGone,
    SayWithdraw,
)
from kvpushd.core.outbox import Outbox
from kvpushd.core.receiver import Receiver
from kvpushd.core.reservation import Reservation
from kvpushd.core.sender import Sender
from kvpushd.core.target import Target
from kvpushd.core.words import Incarnation, Instant, LinkId, Phase


class Ledger:
    """What every half of the node stands for, and what has to happen next."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.engines = Engines()
        self._out = Outbox()
        self._receiver = Receiver(self.engines, self.limits, self._out)
        self._sender = Sender(self.engines, self.limits, self._out)

    def handle(self, event: Event, now: Instant) -> list[Instruction]:
        """Takes one event in. The instructions are to be carried out in their order."""
        todo: deque[Event] = deque([event])
        out: list[Instruction] = []
        while todo:
            self._apply(todo.popleft(), now)
            self._sender.pump(now)
            for instruction in self._out.take():
                answer = self._at_home(instruction)
                if answer is None:
                    out.append(instruction)
                else:
                    todo.append(answer)
        out.extend(self._let_go())
        return out

    def _apply(self, event: Event, now: Instant) -> None:
        receiver, sender = self._receiver, self._sender
        match event:
            case Advanced():
                sender.advanced(event, now)
            case WriteEnded():
                sender.write_ended(event, now)
            case HandedOff():
                sender.handed_off(event, now)
            case Reserved():
                receiver.reserved(event, now)
            case Cancelled(side=Side.RECEIVER):
                receiver.cancelled(event, now)
            case Cancelled():
                sender.cancelled(event, now)
            case Declined():
                receiver.declined(event)
            case Reached():
                receiver.reached(event, now)
            case PeerMatched():
                receiver.matched(event, now)
            case PeerMoving():
                receiver.moving(event, now)
            case PeerLanded():
                receiver.landed(event, now)
            case PeerEnded():
                receiver.ended(event, now)
            case PeerFenced():
                receiver.fenced(event, now)
            case InletClosed():
                receiver.inlet_closed(event, now)
            case LinkLost():
                receiver.link_lost(event, now)
            case Described():
                sender.described(event)
            case Announced():
                sender.announced(event, now)
            case Withdrawn():
                sender.withdrawn(event, now)
            case ReceiverGone():
                sender.receiver_gone(event, now)
            case ReceiverLost():
                sender.receiver_lost(event, now)
            case EngineJoined():
                self._engine_joined(event)
            case PoolMapped():
                self._pool_mapped(event, now)
            case EngineLeft():
                self._engine_left(event, now)
            case MoverDied():
                self._mover_died(event, now)
            case DrainBegan():
                receiver.draining = sender.draining = True
            case Tick():
                receiver.tick(now)
                sender.tick(now)

    def _engine_joined(self, event: EngineJoined) -> None:
        if self.engines.get(event.incarnation) is None:
            engine = Engine(
                event.incarnation, event.engine_id, event.fingerprint, event.world_size, event.local_ranks
            )
            self.engines.add(engine)

    def _pool_mapped(self, event: PoolMapped, now: Instant) -> None:
        engine = self.engines.get(event.incarnation)
        if engine is None or engine.left:
            return
        engine.add(event.rank, event.layout)
        if engine.ready:
            self._receiver.engine_ready(engine, now)
            self._sender.engine_ready(engine)

    def _mover_died(self, event: MoverDied, now: Instant) -> None:
        engines = [e for e in map(self.engines.get, sorted(event.incarnations)) if e is not None]
        for engine in engines:
            engine.mapped.clear()
            self._sender.mover_died(engine.incarnation)
        for engine in engines:
            self._receiver.mover_died(engine.incarnation, now)

    def _engine_left(self, event: EngineLeft, now: Instant) -> None:
        engine = self.engines.get(event.incarnation)
        if engine is None or engine.left:
            return
        engine.left = True
        self._sender.engine_left(engine, event.detail, now)
        self._receiver.engine_left(engine, event.detail, now)

    def _at_home(self, instruction: Instruction) -> Event | None:
        """What is said to oneself, as the event that it is on the other side."""
        match instruction:
            case SayAnnounce(announced=said) if is_local(said.link):
                return said
            case SayWithdraw(withdrawn=withdrawn) if is_local(withdrawn.link):
                return withdrawn
            case SayReceiverGone(gone=gone) if is_local(gone.link):
                return gone
            case SayPeer(item=item) if is_local(item.link):
                return item
            case SayReached(reached=reached) if is_local(reached.link):
                return reached
            case Reach(link=link, incarnation=incarnation, sender_engine_id=name) if is_local(link):
                engine = self.engines.get(incarnation)
                if engine is None:
                    fault = Fault(Reason.ENGINE_GONE, "the receiving engine left")
                    return Reached(link, incarnation, name, fault)
                return Described(link, engine.as_receiver(), name)
        return None

    def _let_go(self) -> list[Instruction]:
        gone = [e for e in self.engines if e.left and not self._holds(e.incarnation)]
        for engine in gone:
            self.engines.remove(engine.incarnation)
            self._receiver.forget(engine.incarnation)
            self._sender.forget(engine.incarnation)
        return [LetGo(engine.incarnation) for engine in gone]

    def _holds(self, incarnation: Incarnation) -> bool:
        return self._receiver.holds(incarnation) or self._sender.holds(incarnation)

    # --- views -------------------------------------------------------------------------------------------

    def reservations(self) -> list[Reservation]:
        """Receiver halves that hold blocks, oldest first."""
        return self._receiver.halves()

    def handoffs(self) -> list[tuple[Handoff, list[Target]]]:
        """Sender halves that hold blocks, oldest first, with what they fill."""
        return self._sender.halves()

    def rate(self, link: LinkId) -> float:
        """Bytes per second that a link carries while it is busy, as its writes have shown; 0 = not known."""
        return self._sender.rate(link)

    def announced(self, link: LinkId) -> int:
        """Reservations that a link's node has announced and that are held, matched or not."""
        return self._sender.announced_by(link)

    @property
    def writes(self) -> int:
        """Writes that are not terminal."""
        return self._sender.writes

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of ended halves whose fence has not come yet."""
        held = sum(r.block_count for r in self.reservations() if r.phase is Phase.FENCING)
        return held + sum(h.block_count for h, _ in self.handoffs() if h.fault is not None)

    @property
    def idle(self) -> bool:
        """Nothing is held: a drain is over."""
        return self._receiver.idle and self._sender.idle

    @property
    def attention(self) -> Attention:
        """How eagerly movers have to look for bytes from other nodes."""
        return self._receiver.attention
