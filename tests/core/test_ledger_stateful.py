# SPDX-License-Identifier: Apache-2.0
"""The ledger's invariants, in a world where everything may happen at any time.

The world (world.py) checks, at every step, what engines rely on; see its assertions for the invariants that
concern bytes and ends. What concerns the whole is below, one invariant each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpush_client.events import Side, TransferKey
from kvpushd.core.attention import Attention
from kvpushd.core.events import (
    Advanced,
    Announced,
    Cancelled,
    EngineLeft,
    HandedOff,
    InletClosed,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    PoolMapped,
    Reached,
    ReceiverGone,
    Reserved,
    Tick,
    Withdrawn,
    WriteEnded,
)
from kvpushd.core.words import SECOND
from tests.core.pools import Model
from tests.core.world import LIMITS, Engine, Held, World

T = TypeVar("T")
MAY_BE_DOUBLED = (
    Advanced
    | Announced
    | Cancelled
    | EngineLeft
    | HandedOff
    | PeerEnded
    | PeerFenced
    | PeerLanded
    | PeerMatched
    | PeerMoving
    | PoolMapped
    | Reached
    | ReceiverGone
    | Reserved
    | Tick
    | Withdrawn
    | WriteEnded
)
WAYS = ["PD", "PD", "PD", "PE", "EP", "DE", "ED", "DP"]
NAMED = ["", "", "right", "wrong"]
LAYERS = [(0, 2), (0, 1), (1, 2)]
SPANS = [SECOND // 10, SECOND, 3 * SECOND, 16 * SECOND]
picks = st.integers(0, 255)
MUCH = {
    "seed": st.integers(0, 1 << 32),
    "actions": st.integers(1, 300),
    "harm": st.sampled_from([0.05, 0.3, 1.0]),
}
"""What happens to a world at once."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request: who sends, who receives, and what."""

    transfer_id: bytes
    senders: tuple[Engine, ...]
    receivers: tuple[Engine, ...]
    prompt: int
    start: int
    named: str


class Machine(RuleBasedStateMachine):
    """Two or three nodes, P and D and one that shares P's node, and all that can befall them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(replace(LIMITS, pinned_share=0.5))
        self.transfers: list[Transfer] = []
        self.parts: dict[str, list[Engine]] = {}

    @initialize(
        heads=st.sampled_from([1, 2]),
        tps=st.tuples(*[st.sampled_from([1, 2])] * 3),
        sizes=st.tuples(*[st.sampled_from([2, 4])] * 3),
        spread=st.sampled_from(["", "P", "D", "PD"]),
        opaque=st.booleans(),
        much=st.fixed_dictionaries(MUCH),
    )
    def begin(
        self,
        heads: int,
        tps: tuple[int, int, int],
        sizes: tuple[int, int, int],
        spread: str,
        opaque: bool,
        much: dict[str, Any],
    ) -> None:
        model = Model((0, 0), heads=heads, planes=(1,), opaque=opaque)
        for name, node, tp, size in zip("PDE", "ABA", tps, sizes, strict=True):
            size = 4 if opaque else size
            nodes = (node, "C") if name in spread else (node,)
            tp = max(tp, len(nodes))
            self.parts[name] = self.world.engine(
                name, *nodes, model=model, tp=tp, block_size=size, blocks=40 // size
            )
        self.much_happens(**much)

    # --- picking -----------------------------------------------------------------------------------------

    def pick(self, things: Sequence[T], pick: int) -> T | None:
        return things[pick % len(things)] if things else None

    def transfer(self, pick: int) -> Transfer | None:
        # The latest ones are the ones that are likely to be alive.
        return self.pick(self.transfers[-4:], pick)

    def handoff(self, pick: int) -> tuple[Engine, Held] | None:
        """One that its engine can still do something with."""
        live = [
            (engine, held)
            for engine in self.world.engines
            for held in engine.handoffs.values()
            if held.incarnation == engine.incarnation
        ]
        return self.pick(live, pick)

    def reservation(self, pick: int) -> tuple[Engine, Held] | None:
        live = [
            (engine, held)
            for engine in self.world.engines
            for held in engine.reservations.values()
            if held.incarnation == engine.incarnation and not held.over
        ]
        return self.pick(live, pick)

    # --- engines -----------------------------------------------------------------------------------------

    @rule(
        way=st.sampled_from(WAYS),
        prompt=st.integers(2, 15),
        start=st.integers(0, 8),
        named=st.sampled_from(NAMED),
    )
    def new_request(self, way: str, prompt: int, start: int, named: str) -> None:
        sender, receiver = way[0], way[1]
        receivers = tuple(self.parts[receiver])
        wanted = {"": "", "right": receiver, "wrong": "X"}[named]
        start = min(start, prompt - 1) // 4 * 4 if start % 2 else 0
        transfer_id = len(self.transfers).to_bytes(16, "big")
        self.transfers.append(
            Transfer(transfer_id, tuple(self.parts[sender]), receivers, prompt, start, wanted)
        )

    @rule(pick=picks, attempt=st.sampled_from([0, 0, 0, 1]))
    def a_receiver_reserves(self, pick: int, attempt: int) -> None:
        transfer = self.transfer(pick)
        if transfer is None:
            return
        for engine in transfer.receivers:
            key = TransferKey(transfer.transfer_id, attempt)
            if engine.incarnation is not None:
                self.world.reserve(engine, key, list(transfer.senders), transfer.start, transfer.prompt)

    @rule(pick=picks)
    def a_sender_opens_a_handoff(self, pick: int) -> None:
        transfer = self.transfer(pick)
        for engine in transfer.senders if transfer else ():
            assert transfer is not None
            key = TransferKey(transfer.transfer_id)
            if engine.incarnation is not None:
                self.world.hand_off(engine, key, transfer.prompt, transfer.named)

    @rule(pick=picks, blocks=st.integers(1, 8), seal=st.booleans())
    def a_sender_names_blocks(self, pick: int, blocks: int, seal: bool) -> None:
        found = self.handoff(pick)
        if found is not None and not found[1].sealed:
            self.world.append(*found, blocks, seal=seal)

    @rule(pick=picks, rank=picks, positions=st.integers(1, 15), layers=st.sampled_from(LAYERS))
    def a_worker_computes(self, pick: int, rank: int, positions: int, layers: tuple[int, int]) -> None:
        found = self.handoff(pick)
        if found is not None:
            engine, held = found
            number = list(engine.layouts)[rank % len(engine.layouts)]
            self.world.compute(engine, held, number, positions, range(*layers))

    @rule(pick=picks)
    def a_prompt_is_computed_to_its_end(self, pick: int) -> None:
        found = self.handoff(pick)
        if found is not None:
            self.computed(*found)

    def computed(self, engine: Engine, held: Held) -> None:
        if not held.sealed:
            self.world.append(engine, held, 99, seal=True)
        for rank in engine.layouts:
            self.world.compute(engine, held, rank, held.end, range(2))

    @rule(pick=picks)
    def a_sender_preempts(self, pick: int) -> None:
        """The next attempt is opened; what the one before read stays as it is until its end."""
        found = self.handoff(pick)
        if found is not None and not found[1].sealed:
            self.next_attempt(*found)

    def next_attempt(self, engine: Engine, held: Held) -> Held | None:
        transfer = next(t for t in self.transfers if t.transfer_id == held.key.transfer_id)
        key = TransferKey(transfer.transfer_id, held.key.attempt + 1)
        return self.world.hand_off(engine, key, transfer.prompt, transfer.named)

    @rule(pick=picks)
    def a_prompt_that_moves_starts_over(self, pick: int) -> None:
        """Preempted and computed again, so soon that what moves of it is not there yet."""
        moving = [
            (write.source, held)
            for write in self.world.writes()
            for held in write.source.handoffs.values()
            if held.incarnation == write.source.incarnation and not held.sealed and write.reads(held)
        ]
        found = self.pick(moving, pick)
        if found is None:
            return
        engine, held = found
        again = self.next_attempt(engine, held)
        if again is not None:
            self.computed(engine, again)
            while engine.said:
                self.world.speak(engine, next(iter(engine.said)))

    @rule(pick=picks)
    def a_sender_cancels(self, pick: int) -> None:
        found = self.handoff(pick)
        if found is not None:
            self.world.cancel(found[0], found[1].key, Side.SENDER)

    @rule(pick=picks)
    def a_receiver_cancels(self, pick: int) -> None:
        found = self.reservation(pick)
        if found is not None:
            self.world.cancel(found[0], found[1].key, Side.RECEIVER)

    @rule(pick=picks, side=st.sampled_from(Side))
    def an_engine_cancels_what_it_may_not_have(self, pick: int, side: Side) -> None:
        transfer = self.transfer(pick)
        if transfer is not None:
            for engine in transfer.senders if side is Side.SENDER else transfer.receivers:
                halves = engine.handoffs if side is Side.SENDER else engine.reservations
                key = TransferKey(transfer.transfer_id)
                if engine.incarnation is not None and key not in halves:
                    self.world.cancel(engine, key, side)

    @rule(pick=picks)
    def a_receiver_declines(self, pick: int) -> None:
        transfer = self.transfer(pick)
        if transfer is not None and transfer.receivers[0].incarnation is not None:
            key = TransferKey(transfer.transfer_id)
            self.world.decline(transfer.receivers[0], key, list(transfer.senders))

    @rule(pick=picks)
    def an_engine_dies(self, pick: int) -> None:
        engine = self.pick([e for e in self.world.engines if e.incarnation is not None], pick)
        if engine is not None:
            self.world.leave(engine)

    @rule(pick=picks, mapped=st.booleans())
    def an_engine_comes_back(self, pick: int, mapped: bool) -> None:
        ready = [e for e in self.world.engines if e.incarnation is None and not e.leaving]
        engine = self.pick(ready, pick)
        if engine is not None:
            self.world.join(engine, mapped=mapped)

    # --- what is under way -------------------------------------------------------------------------------

    @rule(pick=picks)
    def a_process_is_heard(self, pick: int) -> None:
        said = [(engine, session) for engine in self.world.engines for session in engine.said]
        found = self.pick(said, pick)
        if found is not None:
            self.world.speak(*found)

    @rule(pick=picks, fails=st.sampled_from([False, False, False, True]))
    def a_daemon_carries_on(self, pick: int, fails: bool) -> None:
        """With a way, an inlet, a pool, or something that it heard late."""
        world = self.world
        does: list[Callable[[], None]] = []
        for node in world.nodes.values():
            does.extend(partial(world.reach, node, reach, fails=fails) for reach in node.reaches)
            if node.closes:
                does.append(partial(world.close_inlet, node))
            if node.unmapped:
                does.append(partial(world.remap, node))
            if node.late:
                does.append(partial(world.hear_late, node))
        do = self.pick(does, pick)
        if do is not None:
            do()

    @rule(pick=picks, count=st.integers(1, 4))
    def items_arrive(self, pick: int, count: int) -> None:
        for _ in range(count):
            ready = [(w, True) for w in self.world.wires if w.to_sender]
            ready += [(w, False) for w in self.world.wires if w.to_receiver]
            found = self.pick(ready, pick)
            if found is not None:
                self.world.deliver(found[0], to_sender=found[1])

    @rule(steps=st.integers(1, 30))
    def much_is_carried_on(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(pick=picks, lost=st.integers(0, 3))
    def a_link_breaks(self, pick: int, lost: int) -> None:
        wire = self.pick([w for w in self.world.wires if not w.broken], pick)
        if wire is not None:
            self.world.cut(wire, lost)

    @rule(pick=picks, sender=st.booleans())
    def a_side_notices(self, pick: int, sender: bool) -> None:
        knows = [
            w for w in self.world.wires if w.broken and not (w.sender_knows if sender else w.receiver_knows)
        ]
        wire = self.pick(knows, pick)
        if wire is not None:
            self.world.notice(wire, sender=sender)

    # --- movers ------------------------------------------------------------------------------------------

    @rule(pick=picks, count=st.integers(1, 20))
    def bytes_land(self, pick: int, count: int) -> None:
        write = self.pick(self.world.writes(), pick)
        if write is not None:
            self.world.land(write, count)

    @rule(pick=picks)
    def a_write_completes(self, pick: int) -> None:
        write = self.pick(self.world.writes(), pick)
        if write is not None:
            self.world.complete(write)

    @rule(pick=picks)
    def a_write_fails(self, pick: int) -> None:
        write = self.pick(self.world.writes(), pick)
        if write is not None:
            self.world.fail(write)

    @rule(pick=picks, count=st.integers(1, 20))
    def bytes_land_that_were_given_up(self, pick: int, count: int) -> None:
        stray = self.pick(self.world.strays, pick)
        if stray is not None:
            self.world.land_stray(stray, count)

    @rule(pick=picks, writes_first=st.booleans())
    def a_mover_dies(self, pick: int, writes_first: bool) -> None:
        node = self.pick(list(self.world.nodes.values()), pick)
        assert node is not None
        self.world.kill_mover(node, writes_first=writes_first)

    # --- time, and what comes late or twice --------------------------------------------------------------

    @rule(by=st.sampled_from(SPANS))
    def time_passes(self, by: int) -> None:
        self.world.turn(by)

    @rule(pick=picks, which=picks)
    def an_event_comes_again(self, pick: int, which: int) -> None:
        node = self.pick(list(self.world.nodes.values()), pick)
        assert node is not None
        young = [event for at, event in node.fed if at + LIMITS.lease > self.world.now]
        event = self.pick([event for event in young if isinstance(event, MAY_BE_DOUBLED)], which)
        if event is not None:
            self.world.repeat(node, event)

    @rule(pick=picks, which=picks)
    def an_inlet_is_said_to_be_closed_that_nobody_closes(self, pick: int, which: int) -> None:
        node = self.pick(list(self.world.nodes.values()), pick)
        assert node is not None
        found = self.pick(list(node.inlets), which)
        if found is not None and all((close.link, close.incarnation) != found for close in node.closes):
            self.world.feed(node, InletClosed(*found))

    @rule(**MUCH)
    def much_happens(self, seed: int, actions: int, harm: float) -> None:
        """Many of the above in a random order: cheaper by far than to draw them one by one."""
        random = Random(seed)
        weights = [weight * (harm if harmful else 1.0) for weight, harmful, _ in ACTIONS]
        for _, _, act in random.choices(ACTIONS, weights, k=actions):
            act(self, random)
            self.check_all()

    def check_all(self) -> None:
        self.invariants_1_2_and_3_as_the_ledger_sees_them()
        self.invariant_6_nothing_of_an_incarnation_is_left_when_it_is_let_go()
        self.invariant_7_what_has_ended_is_only_held_for_its_fence()
        self.invariant_9_unmatched_handoffs_pin_no_more_than_their_share()
        self.movers_look_for_what_may_come()

    # --- invariants --------------------------------------------------------------------------------------

    @invariant()
    def invariants_1_2_and_3_as_the_ledger_sees_them(self) -> None:
        """What an engine still holds and what its ledger holds is the same, but for what is on its way."""
        for engine in self.world.engines:
            known = {h.key for h in engine.node.ledger.reservations() if h.incarnation == engine.incarnation}
            assert known <= engine.reservations.keys()
            handoffs = {
                h.key for h, _ in engine.node.ledger.handoffs() if h.incarnation == engine.incarnation
            }
            assert handoffs <= engine.handoffs.keys()

    @invariant()
    def invariant_6_nothing_of_an_incarnation_is_left_when_it_is_let_go(self) -> None:
        for node in self.world.nodes.values():
            known = {engine.incarnation for engine in node.ledger.engines}
            assert known == node.engines.keys()
            assert {h.incarnation for h in node.ledger.reservations()} <= known
            assert {h.incarnation for h, _ in node.ledger.handoffs()} <= known

    @invariant()
    def invariant_7_what_has_ended_is_only_held_for_its_fence(self) -> None:
        for node in self.world.nodes.values():
            for half in node.ledger.reservations():
                assert half.fault is None or not half.fenced

    @invariant()
    def invariant_9_unmatched_handoffs_pin_no_more_than_their_share(self) -> None:
        share = self.world.limits.pinned_share
        for engine in self.world.engines:
            pinned = [
                handoff.block_count
                for handoff, _ in engine.node.ledger.handoffs()
                if handoff.incarnation == engine.incarnation and handoff.deadline is not None
            ]
            assert sum(pinned) <= engine.blocks * share

    @invariant()
    def movers_look_for_what_may_come(self) -> None:
        for node in self.world.nodes.values():
            remote = [
                half for half in node.ledger.reservations() if any(link != "local" for link in half.parts)
            ]
            assert (node.ledger.attention is not Attention.IDLE) == bool(remote)

    def teardown(self) -> None:
        self.world.end()


def any_of(random: Random) -> int:
    return random.randrange(256)


Act = Callable[[Machine, Random], None]
ACTIONS: list[tuple[float, bool, Act]] = [
    (
        6,
        False,
        lambda m, r: m.new_request(r.choice(WAYS), r.randint(2, 15), r.randint(0, 8), r.choice(NAMED)),
    ),
    (8, False, lambda m, r: m.a_receiver_reserves(any_of(r), r.choice([0, 0, 0, 1]))),
    (8, False, lambda m, r: m.a_sender_opens_a_handoff(any_of(r))),
    (5, False, lambda m, r: m.a_sender_names_blocks(any_of(r), r.randint(1, 8), r.random() < 0.5)),
    (8, False, lambda m, r: m.a_worker_computes(any_of(r), any_of(r), r.randint(1, 15), r.choice(LAYERS))),
    (5, False, lambda m, r: m.a_prompt_is_computed_to_its_end(any_of(r))),
    (2, True, lambda m, r: m.a_sender_preempts(any_of(r))),
    (15, False, lambda m, r: m.a_prompt_that_moves_starts_over(any_of(r))),
    (1, True, lambda m, r: m.a_sender_cancels(any_of(r))),
    (2, True, lambda m, r: m.a_receiver_cancels(any_of(r))),
    (1, True, lambda m, r: m.an_engine_cancels_what_it_may_not_have(any_of(r), r.choice(list(Side)))),
    (1, True, lambda m, r: m.a_receiver_declines(any_of(r))),
    (1, True, lambda m, r: m.an_engine_dies(any_of(r))),
    (4, False, lambda m, r: m.an_engine_comes_back(any_of(r), r.random() < 0.5)),
    (25, False, lambda m, r: m.a_process_is_heard(any_of(r))),
    (15, False, lambda m, r: m.a_daemon_carries_on(any_of(r), r.random() < 0.1)),
    (20, False, lambda m, r: m.items_arrive(any_of(r), r.randint(1, 4))),
    (6, False, lambda m, r: m.much_is_carried_on(r.randint(1, 30))),
    (1, True, lambda m, r: m.a_link_breaks(any_of(r), r.randint(0, 3))),
    (3, False, lambda m, r: m.a_side_notices(any_of(r), r.random() < 0.5)),
    (8, False, lambda m, r: m.bytes_land(any_of(r), r.randint(1, 20))),
    (8, False, lambda m, r: m.a_write_completes(any_of(r))),
    (2, True, lambda m, r: m.a_write_fails(any_of(r))),
    (4, False, lambda m, r: m.bytes_land_that_were_given_up(any_of(r), r.randint(1, 20))),
    (0.6, True, lambda m, r: m.a_mover_dies(any_of(r), r.random() < 0.5)),
    (2, True, lambda m, r: m.time_passes(r.choice(SPANS))),
    (3, False, lambda m, r: m.an_event_comes_again(any_of(r), any_of(r))),
    (1, True, lambda m, r: m.an_inlet_is_said_to_be_closed_that_nobody_closes(any_of(r), any_of(r))),
]
"""How often, whether it does harm, and what."""

common = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestLedger = Machine.TestCase
TestLedger.settings = settings(common, max_examples=300, stateful_step_count=25)


class LongMachine(Machine):
    """The same, for longer."""


TestLedgerForLong = pytest.mark.long(pytest.mark.timeout(0)(LongMachine.TestCase))
LongMachine.TestCase.settings = settings(common, max_examples=4000, stateful_step_count=120)
