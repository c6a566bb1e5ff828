# SPDX-License-Identifier: Apache-2.0
"""A world (tests/core/world.py) whose every step can be watched, counted and broken.

What is under way is a `Thing`: the next message of a session or of a link's one way, a call of a mover's, a
write. A step carries one on. At the step that a test names, the thing suffers a fault instead; time passes
until whoever watches over such a thing in a real node has noticed, and what it does then is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpush_client.events import Side, TransferKey
from kvpushd.core.events import InletClosed, PoolMapped, WriteEnded
from kvpushd.core.instructions import Reach
from kvpushd.core.reservation import TRANSITIONS, Part, Reservation, Word
from kvpushd.core.target import phase_of
from kvpushd.core.words import SECOND, Instant, Phase
from testing.faults.rules import Act
from tests.core.world import LIMITS, Engine, Node, Session, Wire, World, Write

KEY = TransferKey(b"k" * 16)
PROMPT = 40
"""Positions: three writes."""

FAULTS = tuple(act for act in Act if act is not Act.EXIT)

# After how long a daemon gives up what hangs: see kvpushd/settings.py, and client/kvpush_client/link.py.
LINK_SILENCE = 10 * SECOND
BEAT = LINK_SILENCE // 3
SESSION_SILENCE = 10 * SECOND
CONNECT_TIMEOUT = 5 * SECOND
MOVER_SILENCE = 15 * SECOND
WRITE_PATIENCE = 2 * LIMITS.lease
LATE = SECOND

Transition = tuple[Part, Word] | tuple[Phase, Phase]
"""Of a part of a reservation, or of a handoff."""


@dataclass(frozen=True)
class Thing:
    """Something under way: `carry` does it.

    A message waits in a `queue`; a call can be answered `again`. `patience` is how long it may take,
    `noticed` how long it takes until its loss is noticed; then `broken` happens. `fails` is what becomes of a
    call.
    """

    name: str
    key: object
    """Tells it from what waits beside it."""
    carry: Callable[[], None]
    broken: Callable[[], None] = lambda: None
    patience: Instant = 0
    noticed: Instant = 0
    queue: deque[Any] | None = None
    again: Callable[[], None] = lambda: None
    fails: Callable[[], None] | None = None


@dataclass(frozen=True)
class Fault:
    """What goes wrong at a step: with the thing that it carries, or with the first that follows from it."""

    step: int
    act: Act
    follows: bool = False


@dataclass(frozen=True)
class Hold:
    """Something stands still for a while; then it goes on, or whoever watched over it acts."""

    key: object
    wait: Instant
    then: Callable[[], None]


class Stage:
    """P on node A sends to D on another node, or on the same; `lost` are words of the sender that no receiver
    ever hears. Both have so many ranks."""

    def __init__(
        self, fault: Fault | None = None, lost: tuple[type, ...] = (), *, node: str = "B", ranks: int = 1
    ) -> None:
        self.world = World(LIMITS)
        (self.p,) = self.world.engine("P", "A", tp=ranks)
        (self.d,) = self.world.engine("D", node, tp=ranks)
        self.fault = fault
        self.lost = lost
        self.fired = False
        self.since = self.world.now
        """When something was last done, or went wrong: leases count from here at the latest."""
        self.steps = 0
        self.transitions: list[tuple[int, Transition]] = []
        """Each with the number of the step that made it."""
        self.follows: set[int] = set()
        """Steps after which something new was under way."""
        self._holds: list[Hold] = []
        self._known: dict[int, Reservation] = {}

    # --- what a test does --------------------------------------------------------------------------------

    def reserve(self) -> None:
        self.since = self.world.now
        self.world.reserve(self.d, KEY, [self.p], 0, PROMPT)
        self.settle()

    def hand_off(self, computed: int = PROMPT) -> None:
        """Opens a handoff and computes that many positions; with the last it is sealed."""
        self.since = self.world.now
        held = self.world.hand_off(self.p, KEY, PROMPT)
        assert held is not None
        self.world.append(self.p, held, -(-computed // self.p.size), seal=computed >= PROMPT)
        for rank in self.p.layouts:
            self.world.compute(self.p, held, rank, computed, range(2))
        self.settle()

    def cancel(self, side: Side) -> None:
        """Whoever has it yet takes a half back."""
        engine, halves = (self.p, self.p.handoffs) if side is Side.SENDER else (self.d, self.d.reservations)
        if engine.incarnation is not None and KEY in halves:
            self.world.cancel(engine, KEY, side)
        self.settle()

    def cut(self) -> None:
        for wire in self.world.wires:
            self.world.cut(wire)
        self.settle()

    def fail_a_write(self) -> None:
        for write in self.world.writes()[:1]:
            self.world.fail(write)
        self.settle()

    # --- steps -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carries on everything but the writes."""
        self._go(writes=False)

    def run(self) -> None:
        """Carries on everything, the writes too."""
        self._go(writes=True)

    def _go(self, *, writes: bool) -> None:
        for _ in range(10_000):
            if self._step(writes=writes):
                continue
            if not self._holds:
                return
            self._wait(self._holds.pop(0))
        raise AssertionError("it never comes to rest")

    def _wait(self, hold: Hold) -> None:
        waited = 0
        while waited < hold.wait:
            self._pass_time()
            waited += SECOND
            while self._step(writes=True, but=hold.key):
                pass
        hold.then()

    def _pass_time(self) -> None:
        self.world.turn(SECOND)
        if self.world.now > self.since + LIMITS.lease + SECOND:
            waits = [held for held in self.d.reservations.values() if not held.over]
            assert not waits or self.d.incarnation is None, "the request ends by its lease (invariant 4)"

    def _step(self, *, writes: bool, but: object = None) -> bool:
        held = {hold.key for hold in self._holds} | {but}
        for thing in self.things(writes=writes):
            if thing.key in held:
                continue
            if self._is_lost(thing):
                return True
            self.steps += 1
            if self.fault is not None and self.fault.step == self.steps and not self.fault.follows:
                self._suffer(thing, self.fault.act)
            else:
                self._carry(thing)
            return True
        return False

    def _is_lost(self, thing: Thing) -> bool:
        lost = thing.queue is not None and isinstance(thing.queue[0], self.lost)
        if lost and thing.queue is not None:
            thing.queue.popleft()
        return lost

    def _carry(self, thing: Thing) -> None:
        before = self._look()
        waiting = {other.key: other.name for other in self.things(writes=True)}
        thing.carry()
        after = self._look()
        for what, old in before.items():
            if after[what] != old:
                self.transitions.append((self.steps, _transition(old, after[what])))
        new = [t for t in self.things(writes=True) if t.key not in waiting]
        if new:
            self.follows.add(self.steps)
            if self.fault is not None and self.fault.step == self.steps and self.fault.follows:
                self._suffer(new[0], self.fault.act)

    def _look(self) -> dict[object, Part | Phase]:
        """Where every part and every handoff stands; of what is gone, where it ended."""
        found: dict[object, Part | Phase] = {}
        for node in self.world.nodes.values():
            for reservation in node.ledger.reservations():
                self._known[id(reservation)] = reservation
        for reservation in self._known.values():
            for link, part in reservation.parts.items():
                found[id(reservation), link] = part
        found["handoff"] = Phase.ENDED
        for handoff, targets in self.p.node.ledger.handoffs():
            found["handoff"] = phase_of(handoff, targets)
        return found

    # --- what is under way -------------------------------------------------------------------------------

    def things(self, *, writes: bool) -> Iterator[Thing]:
        """In the order in which they are carried on."""
        for engine in self.world.engines:
            for session, queue in list(engine.said.items()):
                if queue:
                    yield self._said(engine, session)
        for node in self.world.nodes.values():
            yield from self._in(node)
        for wire in list(self.world.wires):
            yield from self._on(wire)
        for write in self.world.writes() if writes else ():
            yield self._write(write)

    def _said(self, engine: Engine, session: Session) -> Thing:
        def leave() -> None:
            if engine.incarnation is not None:
                self.world.leave(engine)

        queue = engine.said[session]
        return Thing(
            f"session.send.{type(queue[0]).__name__}",
            (engine.uid, session),
            partial(self.world.speak, engine, session),
            broken=leave,
            patience=SESSION_SILENCE,
            noticed=SESSION_SILENCE,
            queue=queue,
        )

    def _in(self, node: Node) -> Iterator[Thing]:
        world = self.world
        kill = partial(world.kill_mover, node, writes_first=True)
        if node.late:
            yield Thing("late", (node.name, "late"), partial(world.hear_late, node))
        for reach in node.reaches:

            def fails(reach: Reach = reach) -> None:
                if reach in node.reaches:
                    world.reach(node, reach, fails=True)

            carry = partial(world.reach, node, reach)
            yield Thing("reach", reach, carry, fails, CONNECT_TIMEOUT, CONNECT_TIMEOUT, fails=fails)
        if node.closes:
            closed = InletClosed(node.closes[0].link, node.closes[0].incarnation)
            yield Thing(
                "mover.send.CloseInlet",
                (node.name, "close"),
                partial(world.close_inlet, node),
                kill,
                MOVER_SILENCE,
                MOVER_SILENCE,
                again=partial(world.feed, node, closed),
                fails=kill,
            )
        if node.unmapped:
            incarnation, rank = node.unmapped[0]
            mapped = PoolMapped(incarnation, rank, node.engines[incarnation].layouts[rank])
            yield Thing(
                "mover.send.MapPool",
                (node.name, "map"),
                partial(world.remap, node),
                kill,
                MOVER_SILENCE,
                MOVER_SILENCE,
                again=partial(world.feed, node, mapped),
                fails=kill,
            )

    def _on(self, wire: Wire) -> Iterator[Thing]:
        world = self.world

        def cut() -> None:
            world.cut(wire)

        for knows, sender in ((wire.receiver_knows, False), (wire.sender_knows, True)):
            if wire.broken and not knows:
                yield Thing("notice", (id(wire), sender), partial(world.notice, wire, sender=sender))
        for queue, to_sender in ((wire.to_sender, True), (wire.to_receiver, False)):
            if not queue:
                continue
            item = queue[0][0] if to_sender else queue[0]
            yield Thing(
                f"peer.send.{type(item).__name__}",
                (id(wire), to_sender, "items"),
                partial(world.deliver, wire, to_sender=to_sender),
                cut,
                LINK_SILENCE,
                BEAT,
                queue=queue,
            )

    def _write(self, write: Write) -> Thing:
        world = self.world
        kill = partial(world.kill_mover, write.node, writes_first=True)
        ended = WriteEnded(write.post.write, None, len(write.cells), 1, self.world.now, self.world.now)
        return Thing(
            "nixl.post",
            write.post.write,
            partial(world.complete, write),
            kill,
            WRITE_PATIENCE,
            WRITE_PATIENCE,
            again=partial(world.feed, write.node, ended),
            fails=partial(world.fail, write),
        )

    # --- faults ------------------------------------------------------------------------------------------

    def _suffer(self, thing: Thing, act: Act) -> None:
        self.fired, self.since = True, self.world.now
        queue = thing.queue
        match act:
            case Act.DELAY:
                self._hold(thing, LATE)
            case Act.REORDER if queue is not None and len(queue) > 1:
                queue[0], queue[1] = queue[1], queue[0]
            case Act.REORDER:
                self._hold(thing, 0)
            case Act.REPEAT if queue is not None:
                queue.appendleft(queue[0])
            case Act.REPEAT:
                self._carry(thing)
                thing.again()
            case Act.DROP if queue is not None:
                queue.popleft()
                self._holds.append(Hold(None, thing.noticed, thing.broken))
            case Act.DROP | Act.HANG:
                self._holds.append(Hold(thing.key, thing.patience, thing.broken))
            case Act.FAIL if thing.fails is not None:
                thing.fails()
            case Act.FAIL:
                self._carry(thing)
                thing.broken()
            case _:
                raise AssertionError(f"{act} can't happen in a world")

    def _hold(self, thing: Thing, wait: Instant) -> None:
        self._holds.append(Hold(thing.key, wait, lambda: None))

    def finish(self) -> None:
        """All the time that a request may take passes; both engines know, and nothing is left of anything."""
        while self.world.now <= self.since + LIMITS.lease + SECOND:
            self._pass_time()
            self.run()
        for engine in (self.p, self.d):
            if engine.incarnation is not None:
                assert not engine.handoffs, "each half ends (invariant 4)"
                assert not engine.reservations, "and its blocks are back"
        self.world.end()


WORDS = {
    Part.ANNOUNCED: Word.ANNOUNCE,
    Part.MATCHED: Word.MATCHED,
    Part.MOVING: Word.MOVING,
    Part.LANDED: Word.LANDED,
    Part.ENDED: Word.ENDED,
    Part.FENCED: Word.FENCED,
}


def _transition(old: Part | Phase, new: Part | Phase) -> Transition:
    """By its name. A part's word is told by where it led, which TRANSITIONS confirms."""
    if isinstance(old, Part):
        assert isinstance(new, Part)
        assert TRANSITIONS[old, WORDS[new]] is new, "as the table has it"
        return old, WORDS[new]
    assert isinstance(new, Phase)
    return old, new
