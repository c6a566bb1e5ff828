# SPDX-License-Identifier: Apache-2.0
"""What a ledger promises, one sentence each. The invariants' numbers are those of docs/architecture.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpush_client.events import Fault, Reason, Side, TransferKey
from kvpush_client.layout import Group
from kvpushd.core.attention import Attention
from kvpushd.core.engines import Limits
from kvpushd.core.events import (
    Advanced,
    Announced,
    Cancelled,
    Described,
    DrainBegan,
    EngineJoined,
    EngineLeft,
    HandedOff,
    InletClosed,
    LinkLost,
    PeerEnded,
    PeerMatched,
    PoolMapped,
    ReceiverGone,
    ReceiverLost,
    Reserved,
    Withdrawn,
    WriteEnded,
)
from kvpushd.core.instructions import (
    Instruction,
    LetGo,
    Post,
    SayPeer,
    SayReached,
    TellHandoffEnded,
    TellRejected,
)
from kvpushd.core.ledger import Ledger
from kvpushd.core.words import LOCAL, SECOND, Incarnation, LinkId, Phase, ReceiverView, SenderAddress
from tests.core.pools import Model, Shape, listed, rank
from tests.core.world import LIMITS, Engine, Held, World, Write

KEY = TransferKey(b"k" * 16)
OTHER = TransferKey(b"o" * 16)
LAYOUT = rank(Model((0, 0), heads=2, planes=(1,)), Shape((Group(4),), blocks=16))


class Pair:
    """P and D, on two nodes or on one, and a request between them."""

    def __init__(
        self, *, local: bool = False, tp: int = 1, limits: Limits = LIMITS, blocks: int = 12
    ) -> None:
        self.world = World(limits)
        (self.p,) = self.world.engine("P", "A", tp=tp, blocks=blocks)
        (self.d,) = self.world.engine("D", "A" if local else "B", tp=1, blocks=blocks)

    def reserve(self, key: TransferKey = KEY, start: int = 0, end: int = 7) -> Held:
        held = self.world.reserve(self.d, key, [self.p], start, end)
        assert held is not None
        self.world.settle()
        return held

    def hand_off(self, key: TransferKey = KEY, prompt: int = 7, *, computed: int | None = None) -> Held:
        """Opens a handoff and computes that many positions: the whole prompt, sealed, unless said."""
        held = self.world.hand_off(self.p, key, prompt)
        assert held is not None
        self.compute(held, prompt if computed is None else computed)
        return held

    def compute(self, held: Held, upto: int) -> None:
        self.world.append(self.p, held, -(-upto // self.p.size) - len(held.blocks), seal=upto >= held.end)
        for number in self.p.layouts:
            self.world.compute(self.p, held, number, upto, range(2))
        self.world.settle()

    def cancel_reservation(self, key: TransferKey = KEY) -> None:
        self.world.cancel(self.d, key, Side.RECEIVER)
        self.world.settle()

    def cancel_handoff(self, key: TransferKey = KEY) -> None:
        self.world.cancel(self.p, key, Side.SENDER)
        self.world.settle()

    @property
    def write(self) -> Write:
        (write,) = self.world.writes()
        return write


def ends(engine: Engine) -> list[Reason | None]:
    """How an engine's halves have ended."""
    return [fault.reason if fault is not None else None for fault in engine.faults]


both_ways = pytest.mark.parametrize("local", [False, True], ids=["over a link", "on one node"])


# --- the way that it goes well ---------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("first", ["D", "P"])
def test_whichever_half_comes_first_all_kv_lands_and_each_half_ends_once(local: bool, first: str) -> None:
    pair = Pair(local=local)
    does: list[Callable[[], object]] = [pair.reserve, pair.hand_off]
    for do in does if first == "D" else reversed(does):
        do()
    pair.world.run()
    assert ends(pair.p) == ends(pair.d) == [None]
    assert pair.world.landed_transfers == 1
    pair.world.end()


@both_ways
def test_what_a_chunk_makes_final_moves_while_the_prompt_is_still_computed(local: bool) -> None:
    pair = Pair(local=local)
    pair.reserve(end=11)
    handoff = pair.hand_off(prompt=11, computed=4)
    assert pair.write.post.window.end == 4
    pair.world.run()
    assert ends(pair.d) == []
    pair.world.turn(SECOND)
    pair.compute(handoff, 11)
    pair.world.run()
    assert ends(pair.d) == ends(pair.p) == [None]
    (account,) = [a for a in pair.p.node.accounts if a.side is Side.SENDER]
    assert account.counts.chunks >= 2
    assert account.counts.chunks_before_seal >= 1


def test_what_is_named_but_not_final_is_not_written() -> None:
    pair = Pair()
    pair.reserve()
    handoff = pair.world.hand_off(pair.p, KEY, 7)
    assert handoff is not None
    pair.world.append(pair.p, handoff, 2, seal=True)
    pair.world.settle()
    assert pair.world.writes() == []


def test_what_a_layer_makes_final_moves_while_the_next_one_is_computed() -> None:
    pair = Pair()
    pair.reserve()
    handoff = pair.world.hand_off(pair.p, KEY, 7)
    assert handoff is not None
    pair.world.append(pair.p, handoff, 2, seal=True)
    pair.world.compute(pair.p, handoff, 0, 7, range(1))
    pair.world.settle()
    window = pair.write.post.window
    assert (window.first_layer, window.end_layer, window.end) == (0, 1, 7)


def test_a_worker_may_be_heard_before_its_scheduler() -> None:
    pair = Pair()
    pair.reserve()
    handoff = pair.world.hand_off(pair.p, KEY, 7)
    assert handoff is not None
    pair.world.append(pair.p, handoff, 2, seal=True)
    pair.world.compute(pair.p, handoff, 0, 7, range(2))
    pair.world.speak(pair.p, 0)
    pair.world.run()
    assert ends(pair.d) == [None]


def test_a_receiver_with_a_prefix_gets_the_positions_that_it_lacks_and_no_others() -> None:
    pair = Pair()
    pair.hand_off(prompt=11)
    pair.reserve(start=4, end=11)
    assert (pair.write.post.window.start, pair.write.post.window.end) == (4, 11)
    pair.world.run()
    assert ends(pair.d) == [None]


def test_a_receiver_whose_prompt_has_a_token_more_than_the_senders_gets_what_the_sender_has() -> None:
    # R8: a router added the sender's first token, so the receiver has a block more. Positions decide.
    pair = Pair()
    pair.hand_off(prompt=8)
    pair.reserve(end=8)
    pair.world.run()
    assert ends(pair.d) == [None]


@pytest.mark.parametrize("prompt", [8, 6], ids=["another block", "the rest of the last block"])
def test_positions_beyond_the_seal_are_refused_and_both_sides_hear_why(prompt: int) -> None:
    pair = Pair()
    pair.hand_off(prompt=prompt)
    pair.reserve(end=prompt + 1)
    assert ends(pair.d) == ends(pair.p) == [Reason.POSITIONS_MISSING]
    assert pair.world.writes() == []


@pytest.mark.parametrize("reserves_first", [True, False])
def test_another_prompt_is_refused_before_anything_moves_and_both_sides_hear_why(
    reserves_first: bool,
) -> None:
    pair = Pair()
    prompts = {7: b"P's", 8: b"P's and a token"}
    if reserves_first:
        pair.world.reserve(pair.d, KEY, [pair.p], 0, 7, prompt=b"D's")
        pair.world.settle()
    pair.world.hand_off(pair.p, KEY, 8, prompts=prompts)
    pair.world.settle()
    if not reserves_first:
        pair.world.reserve(pair.d, KEY, [pair.p], 0, 7, prompt=b"D's")
        pair.world.settle()
    assert ends(pair.d) == ends(pair.p) == [Reason.PROMPT_MISMATCH]
    assert pair.world.writes() == []
    assert pair.d.node.ledger.idle
    assert pair.p.node.ledger.idle


@pytest.mark.parametrize(
    ("end", "prompt"), [(7, b"the same"), (8, b"and a token"), (6, b"part of it"), (7, b"")]
)
def test_the_same_prompt_a_part_of_it_and_one_that_is_not_known_are_taken(end: int, prompt: bytes) -> None:
    pair = Pair()
    pair.world.reserve(pair.d, KEY, [pair.p], 0, end, prompt=prompt)
    held = pair.world.hand_off(pair.p, KEY, 8, prompts={7: b"the same", 8: b"and a token"})
    assert held is not None
    pair.compute(held, 8)
    pair.world.run()
    assert ends(pair.d) == [None]


def test_a_handoff_that_begins_after_what_is_wanted_ends_before_anything_moves() -> None:
    pair = Pair()
    pair.reserve()
    inc = pair.p.incarnation
    assert inc is not None
    pair.world.hand_off(pair.p, KEY, 7)
    pair.p.say(HandedOff(inc, KEY, (listed(4, 1),)))
    pair.world.settle()
    assert ends(pair.d) == [Reason.POSITIONS_MISSING]


def test_unequal_tensor_parallelism_is_one_write_per_pair_of_ranks() -> None:
    pair = Pair(tp=2)
    pair.reserve()
    pair.hand_off()
    assert {write.post.source_rank for write in pair.world.writes()} == {0, 1}
    pair.world.run()
    assert ends(pair.d) == [None]


# --- invariant 1: no write after fence -------------------------------------------------------------------


@both_ways
def test_an_aborted_reservation_is_released_only_after_its_last_write_is_terminal(local: bool) -> None:
    # R1
    pair = Pair(local=local)
    held = pair.reserve()
    pair.hand_off()
    pair.cancel_reservation()
    assert ends(pair.d) == [Reason.CANCELLED]
    assert not held.released
    pair.world.complete(pair.write)
    pair.world.settle()
    assert held.released
    assert ends(pair.p) == [Reason.PEER_CANCELLED]


@both_ways
def test_both_halves_account_for_when_the_fault_came_and_when_the_fence(local: bool) -> None:
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off()
    since = pair.world.now
    pair.cancel_reservation()
    pair.world.turn(SECOND)
    pair.world.complete(pair.write)
    pair.world.settle()
    accounts = [account for node in pair.world.nodes.values() for account in node.accounts]
    assert sorted(account.side.value for account in accounts) == ["receiver", "sender"]
    assert {(account.faulted_at, account.times.ended) for account in accounts} == {(since, since + SECOND)}


@both_ways
def test_a_reservation_that_is_aborted_before_anything_was_posted_is_released_at_once(local: bool) -> None:
    pair = Pair(local=local)
    held = pair.reserve()
    pair.cancel_reservation()
    assert held.released
    assert not pair.world.writes()


def test_hundreds_of_aborts_at_once_are_fenced_with_the_writes_in_flight() -> None:
    # R13
    pair = Pair(blocks=2048)
    keys = [TransferKey(i.to_bytes(16, "big")) for i in range(300)]
    held = [pair.reserve(key, end=4) for key in keys]
    for key in keys[:10]:
        pair.hand_off(key, prompt=4)
    for key in keys:
        pair.world.cancel(pair.d, key, Side.RECEIVER)
    pair.world.run()
    assert all(h.released for h in held)
    assert pair.d.node.ledger.idle


def test_a_write_that_fails_over_a_link_is_fenced_by_closing_the_inlet_at_once() -> None:
    # The ladder's rung (c): the failure only says that nothing reads the source any more.
    pair = Pair()
    held = pair.reserve()
    pair.hand_off()
    pair.world.fail(pair.write)
    while not pair.d.node.closes:
        assert pair.world.step()
    assert ends(pair.d) == [Reason.TRANSPORT_FAILED]
    assert not held.released
    (stray,) = pair.world.strays
    pair.world.land_stray(stray, 2)
    pair.world.settle()
    assert held.released


def test_a_write_that_fails_on_the_node_itself_is_over() -> None:
    pair = Pair(local=True)
    held = pair.reserve()
    pair.hand_off()
    pair.world.fail(pair.write)
    assert ends(pair.d) == ends(pair.p) == [Reason.TRANSPORT_FAILED]
    assert held.released


def test_the_senders_word_is_the_first_rung_of_the_ladder_and_closes_nothing() -> None:
    pair = Pair()
    held = pair.reserve()
    pair.hand_off()
    pair.cancel_handoff()
    assert not held.released
    assert ends(pair.d) == [Reason.PEER_CANCELLED]
    pair.world.complete(pair.write)
    pair.world.settle()
    assert held.released
    assert all(inlet.open for inlet in pair.d.node.inlets.values())


def test_a_sender_that_does_not_say_that_its_writes_are_over_has_its_inlet_closed() -> None:
    # R39: it was stopped. The request ends at once, its blocks after the fence, which is bounded.
    pair = Pair()
    held = pair.reserve()
    pair.hand_off()
    pair.cancel_reservation()
    pair.world.turn(LIMITS.fence_patience)
    assert pair.d.node.closes
    assert not held.released
    pair.world.settle()
    assert held.released


def test_what_else_came_through_a_closed_inlet_ends_and_the_next_transfer_gets_a_new_one() -> None:
    pair = Pair()
    pair.reserve()
    pair.reserve(OTHER)
    pair.hand_off()
    pair.world.fail(pair.write)
    while not pair.d.node.closes:
        assert pair.world.step()
    # At once: a mover may take its time to close an inlet.
    assert ends(pair.d) == [Reason.TRANSPORT_FAILED, Reason.FENCED]
    pair.world.settle()
    again = TransferKey(b"a" * 16)
    pair.reserve(again)
    pair.hand_off(again)
    pair.world.run()
    assert ends(pair.d)[2:] == [None]


def test_a_lost_link_ends_its_reservations_at_once_and_releases_them_once_the_inlet_is_closed() -> None:
    # Invariant 7, and R39 for a sender that was cut off.
    pair = Pair()
    held = pair.reserve()
    pair.hand_off()
    (wire,) = pair.world.wires
    pair.world.cut(wire)
    pair.world.notice(wire, sender=False)
    assert ends(pair.d) == [Reason.PEER_UNREACHABLE]
    assert not held.released
    pair.world.close_inlet(pair.d.node)
    assert held.released


def test_a_lost_link_leaves_what_comes_over_another_alone() -> None:
    # R18
    world = World()
    ((p,), (q,), (d,)) = (world.engine(name, node) for name, node in (("P", "A"), ("Q", "C"), ("D", "B")))
    for key, sender in ((KEY, p), (OTHER, q)):
        world.reserve(d, key, [sender], 0, 7)
        world.settle()
        handoff = world.hand_off(sender, key, 7)
        assert handoff is not None
        world.append(sender, handoff, 2, seal=True)
        world.compute(sender, handoff, 0, 7, range(2))
        world.settle()
    (lost,) = (wire for wire in world.wires if wire.sender is p.node)
    world.cut(lost)
    world.notice(lost, sender=False)
    assert {close.link for close in d.node.closes} == {LinkId("A")}
    world.run()
    assert ends(d) == [Reason.PEER_UNREACHABLE, None]


def test_a_failed_write_stays_unvouched_for_when_its_receiver_takes_it_back_meanwhile() -> None:
    pair = Pair()
    held = pair.reserve()
    pair.hand_off()
    pair.world.cancel(pair.d, KEY, Side.RECEIVER)
    pair.world.speak(pair.d, None)  # the withdrawal is on its way
    pair.world.fail(pair.write)  # and crosses the word that the write failed
    pair.world.deliver(pair.world.wires[0], to_sender=True)
    while pair.world.wires[0].to_receiver:
        pair.world.deliver(pair.world.wires[0], to_sender=False)
    assert not held.released
    pair.world.settle()
    assert held.released


def test_an_inlet_that_closed_by_itself_before_is_not_taken_for_the_one_that_is_open() -> None:
    # The mover died while an inlet was to be closed: the answer comes when another one is open.
    pair = Pair()
    pair.reserve()
    pair.hand_off()
    pair.cancel_reservation()
    pair.world.turn(LIMITS.fence_patience)
    node = pair.d.node
    assert node.closes
    pair.world.kill_mover(node, writes_first=True)
    pair.world.remap(node)
    held = pair.reserve(OTHER)  # settles: the answer has come by now
    pair.hand_off(OTHER)
    link, incarnation = LinkId("A"), pair.d.incarnation
    assert incarnation is not None
    pair.world.feed(node, InletClosed(link, incarnation))
    assert not held.over
    pair.world.run()
    assert ends(pair.d)[-1] is None


# --- invariant 2: no read after release ------------------------------------------------------------------


@both_ways
def test_a_handoff_is_released_when_all_of_its_writes_are_terminal_not_with_the_first_failure(
    local: bool,
) -> None:
    # R3
    pair = Pair(local=local, tp=2)
    pair.reserve()
    handoff = pair.hand_off()
    first, second = pair.world.writes()
    pair.world.fail(first)
    pair.world.settle()
    assert not handoff.told
    pair.world.complete(second)
    assert handoff.told
    assert ends(pair.p) == [Reason.TRANSPORT_FAILED]


def test_an_expired_handoff_can_never_be_posted() -> None:
    # R4
    pair = Pair()
    pair.hand_off()
    pair.world.turn(LIMITS.lease)
    assert ends(pair.p) == [Reason.EXPIRED]
    pair.reserve()
    pair.world.run()
    assert ends(pair.d) == [Reason.EXPIRED]
    assert pair.d.memory == {}


def test_the_blocks_of_an_engine_that_left_are_read_until_the_last_write_is_terminal() -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off()
    gone = pair.p.incarnation
    pair.world.leave(pair.p)
    pair.world.settle()
    assert ends(pair.d) == [Reason.ENGINE_GONE]
    assert gone not in pair.world.let_go
    pair.world.complete(pair.write)
    assert gone in pair.world.let_go


# --- invariant 3: exactly one end per half ---------------------------------------------------------------


def test_a_late_or_doubled_completion_changes_nothing() -> None:
    # R15
    pair = Pair()
    pair.reserve()
    pair.hand_off()
    number = pair.write.post.write
    pair.world.run()
    assert pair.p.node.ledger.writes == 0
    assert pair.p.node.ledger.handle(WriteEnded(number, None), pair.world.now) == []
    late = PeerEnded(LinkId("A"), Incarnation(b"d"), KEY, Fault(Reason.INVALID, ""), fenced=True)
    assert pair.d.node.ledger.handle(late, pair.world.now) == []


def test_a_repeated_reservation_is_harmless_and_another_one_under_its_key_is_refused() -> None:
    pair = Pair()
    pair.reserve()
    inc = pair.d.incarnation
    assert inc is not None
    ledger = pair.d.node.ledger
    (half,) = ledger.reservations()
    assert ledger.handle(half.said, pair.world.now) == []
    (rejected,) = ledger.handle(replace(half.said, end=6), pair.world.now)
    assert isinstance(rejected, TellRejected)
    assert rejected.fault.reason is Reason.DUPLICATE


def test_blocks_that_are_named_again_are_harmless_and_other_ones_in_their_place_are_refused() -> None:
    pair = Pair()
    handoff = pair.hand_off(computed=7, prompt=20)
    inc = pair.p.incarnation
    assert inc is not None
    ledger = pair.p.node.ledger
    same = listed(0, *handoff.blocks)
    assert ledger.handle(HandedOff(inc, KEY, (same,)), pair.world.now) == []
    for wrong in (listed(0, 9), listed(4, 9), listed(12, 9), listed(0, 99), listed(1, 1)):
        (rejected,) = ledger.handle(HandedOff(inc, KEY, (wrong,)), pair.world.now)
        assert isinstance(rejected, TellRejected)
    ((half, _),) = ledger.handoffs()
    assert half.blocks[0].ids.tolist() == handoff.blocks


WRONG_LAYERS = pytest.mark.parametrize(("first", "end"), [(2, None), (0, 3), (1, 1), (1, 0), (99, 100)])
"""In a pool that has layers [0, 2)."""


def advance_wrongly(pair: Pair, first: int, end: int | None) -> None:
    assert pair.p.incarnation is not None
    pair.p.say(Advanced(pair.p.incarnation, 0, KEY, 7, pair.world.now, first, end), 0)


@WRONG_LAYERS
def test_a_worker_that_advances_layers_which_its_pool_does_not_have_ends_its_handoff_saying_which(
    first: int, end: int | None
) -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off(computed=4)
    reading = pair.write
    advance_wrongly(pair, first, end)
    pair.world.settle()
    assert ends(pair.p) == []  # its blocks are being read
    assert ends(pair.d) == [Reason.INVALID]
    assert reading.post.window.end == 4
    pair.world.run()
    assert ends(pair.p) == [Reason.INVALID]
    for fault in (*pair.p.faults, *pair.d.faults):
        assert fault is not None
        said = f"layers [{first}, {'end' if end is None else end})"
        assert fault.detail == f"rank 0 of engine P advanced {said}; its pool has layers [0, 2)"
    pair.world.end()


@WRONG_LAYERS
def test_a_worker_that_is_wrong_before_its_scheduler_is_heard_ends_the_handoff_as_it_comes(
    first: int, end: int | None
) -> None:
    pair = Pair()
    pair.reserve()
    advance_wrongly(pair, first, end)
    pair.world.settle()
    assert ends(pair.d) == []
    pair.hand_off()
    pair.world.run()
    assert ends(pair.p) == ends(pair.d) == [Reason.INVALID]
    pair.world.end()


def test_a_worker_that_is_wrong_after_the_end_changes_nothing() -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off()
    pair.world.run()
    advance_wrongly(pair, 0, 99)
    pair.world.run()
    assert ends(pair.p) == ends(pair.d) == [None]
    pair.world.end()


def test_an_item_that_is_wrong_opens_no_handoff() -> None:
    pair = Pair()
    inc = pair.p.incarnation
    assert inc is not None
    (rejected,) = pair.p.node.ledger.handle(HandedOff(inc, KEY, (listed(0, 99),)), pair.world.now)
    assert isinstance(rejected, TellRejected)
    assert pair.p.node.ledger.idle


@pytest.mark.parametrize("side", Side)
def test_a_half_that_was_cancelled_before_it_was_known_ends_as_it_comes(side: Side) -> None:
    pair = Pair()
    engine = pair.d if side is Side.RECEIVER else pair.p
    pair.world.cancel(engine, KEY, side)
    pair.world.settle()
    if side is Side.RECEIVER:
        pair.reserve()
    else:
        pair.hand_off()
    assert ends(engine) == [Reason.CANCELLED]


def test_a_reservation_whose_key_is_over_is_refused() -> None:
    pair = Pair()
    pair.reserve()
    (half,) = pair.d.node.ledger.reservations()
    pair.hand_off()
    pair.world.run()
    (rejected,) = pair.d.node.ledger.handle(half.said, pair.world.now)
    assert isinstance(rejected, TellRejected)
    assert rejected.fault.reason is Reason.STALE_ATTEMPT
    assert pair.d.node.ledger.idle


def test_an_append_that_comes_after_the_end_opens_nothing() -> None:
    pair = Pair()
    handoff = pair.hand_off(computed=4)
    pair.world.cancel(pair.p, KEY, Side.SENDER)
    pair.world.append(pair.p, handoff, 1, seal=True)
    pair.world.settle()
    assert ends(pair.p) == [Reason.CANCELLED]
    assert pair.p.node.ledger.idle


def test_a_handoff_whose_key_is_over_is_refused() -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off()
    pair.world.run()
    inc = pair.p.incarnation
    assert inc is not None
    (rejected,) = pair.p.node.ledger.handle(HandedOff(inc, KEY), pair.world.now)
    assert isinstance(rejected, TellRejected)
    assert (rejected.side, rejected.fault.reason) == (Side.SENDER, Reason.STALE_ATTEMPT)
    assert pair.p.node.ledger.idle


# --- invariant 4: every request ends in time -------------------------------------------------------------


def test_a_reservation_that_nobody_fills_ends_with_its_lease() -> None:
    # R10
    pair = Pair()
    held = pair.reserve()
    pair.world.turn(LIMITS.lease - 1)
    assert not held.over
    pair.world.turn(1)
    assert ends(pair.d) == [Reason.EXPIRED]
    pair.world.settle()
    assert held.released


def test_a_reservation_whose_sender_is_never_reached_ends_with_its_lease() -> None:
    pair = Pair()
    held = pair.world.reserve(pair.d, KEY, [pair.p], 0, 7)
    assert held is not None
    pair.world.speak(pair.d, None)
    pair.world.turn(LIMITS.lease)
    assert ends(pair.d) == [Reason.EXPIRED]
    assert held.released


def test_a_matched_pair_lives_for_as_long_as_the_prompt_takes() -> None:
    # R6: the lease is the daemons', whatever the engines' forward passes do.
    pair = Pair()
    pair.reserve()
    handoff = pair.hand_off(computed=4)
    pair.world.run()
    for _ in range(10):
        pair.world.turn(LIMITS.lease)
        pair.world.run()
    pair.compute(handoff, 7)
    pair.world.run()
    assert ends(pair.d) == ends(pair.p) == [None]


def test_a_handoff_that_was_sealed_before_its_match_has_no_lease_after_it() -> None:
    pair = Pair()
    pair.hand_off()
    pair.world.turn(LIMITS.lease // 2)
    pair.reserve()
    pair.world.turn(LIMITS.lease // 2)
    assert ends(pair.p) == []
    pair.world.run()
    assert ends(pair.d) == ends(pair.p) == [None]


@both_ways
def test_a_write_that_nothing_is_heard_of_ends_its_request_with_the_lease_and_holds_its_blocks(
    local: bool,
) -> None:
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off()
    pair.world.turn(LIMITS.lease - 1)
    assert ends(pair.d) == []
    pair.world.turn(1)
    pair.world.settle()
    assert ends(pair.d) == [Reason.TRANSPORT_FAILED]
    assert ends(pair.p) == [], "it may yet read"
    pair.world.run()
    assert ends(pair.p) == [Reason.TRANSPORT_FAILED]


def test_a_lease_of_its_own_counts() -> None:
    pair = Pair()
    inc = pair.d.incarnation
    assert inc is not None
    sender = (SenderAddress("P", LinkId("A")),)
    pair.world.reserve(pair.d, KEY, [pair.p], 0, 7)
    pair.d.said.clear()
    reserved = Reserved(inc, KEY, sender, 0, 7, (listed(0, 0, 1),), lease=SECOND)
    pair.world.feed(pair.d.node, reserved)
    pair.world.turn(SECOND)
    assert ends(pair.d) == [Reason.EXPIRED]


# --- invariant 6: incarnation ----------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("who", ["P", "D"])
def test_an_engine_that_restarts_transfers_again_and_nothing_of_before_touches_it(
    local: bool, who: str
) -> None:
    # R17, same name: in the middle of a transfer.
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off()
    engine = pair.p if who == "P" else pair.d
    pair.world.leave(engine)
    pair.world.run()
    pair.world.turn(LIMITS.fence_patience)
    pair.world.run()
    pair.world.join(engine)
    pair.reserve(OTHER)
    pair.hand_off(OTHER)
    pair.world.run()
    assert ends(pair.p)[-1] is None
    assert ends(pair.d)[-1] is None
    pair.world.end()


def test_another_engine_at_the_place_of_one_that_left_is_another_engine() -> None:
    # R17, new identity.
    pair = Pair()
    pair.world.leave(pair.p)
    pair.world.settle()
    (pair.p,) = pair.world.engine("P2", "A")
    pair.reserve()
    pair.hand_off()
    pair.world.run()
    assert ends(pair.d) == [None]


def test_a_reservation_of_an_incarnation_that_left_changes_nothing() -> None:
    pair = Pair()
    pair.reserve()
    (half,) = pair.d.node.ledger.reservations()
    pair.hand_off()  # what is written keeps the incarnation known after it has left
    pair.world.leave(pair.d)
    stale = replace(half.said, key=OTHER)
    assert pair.d.node.ledger.handle(stale, pair.world.now) == []
    assert [held.key for held in pair.d.node.ledger.reservations()] == [KEY]


def test_an_event_of_an_incarnation_that_left_changes_nothing() -> None:
    pair = Pair()
    gone = pair.p.incarnation
    assert gone is not None
    pair.world.leave(pair.p)
    pair.world.settle()
    pair.world.join(pair.p)
    ledger = pair.p.node.ledger
    stale = HandedOff(gone, KEY, (listed(0, 1),), seal=4)
    assert ledger.handle(stale, pair.world.now) == []
    assert ledger.idle


@both_ways
def test_an_engine_is_let_go_when_nothing_can_land_in_its_pools(local: bool) -> None:
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off()
    gone = pair.d.incarnation
    assert gone is not None
    pair.world.leave(pair.d)
    assert gone not in pair.world.let_go
    pair.world.run()
    assert pair.world.let_go == [gone]


# --- invariant 7: failure is said at once ----------------------------------------------------------------


def test_a_sender_that_has_no_such_engine_says_so_at_once() -> None:
    pair = Pair()
    pair.world.leave(pair.p)
    pair.reserve()
    assert ends(pair.d) == [Reason.NO_SUCH_ENGINE]


def test_engines_that_run_another_model_are_refused_by_name() -> None:
    ledger = Ledger()
    ledger.handle(EngineJoined(Incarnation(b"p"), "P", {"model": "this"}, 1, 1), 0)
    ledger.handle(PoolMapped(Incarnation(b"p"), 0, LAYOUT), 0)
    view = ReceiverView("D", Incarnation(b"d"), {"model": "that"}, 1, {0: LAYOUT})
    (said,) = ledger.handle(Described(LinkId("B"), view, "P"), 0)
    assert isinstance(said, SayReached)
    assert said.reached.fault is not None
    assert said.reached.fault.reason is Reason.FINGERPRINT_MISMATCH
    assert "model" in said.reached.fault.detail


@both_ways
def test_a_write_that_can_not_be_posted_is_heard_of_at_once_on_both_sides(local: bool) -> None:
    # R11
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off()
    pair.world.fail(pair.write, Reason.ENGINE_GONE)
    pair.world.settle()
    assert ends(pair.p) == ends(pair.d) == [Reason.ENGINE_GONE]


def test_a_receiver_that_goes_away_lets_the_sender_go_at_once() -> None:
    # R14
    pair = Pair()
    pair.reserve()
    handoff = pair.hand_off(computed=4)
    pair.world.run()
    pair.cancel_reservation()
    assert handoff.told
    assert ends(pair.p) == [Reason.PEER_CANCELLED]


@both_ways
@pytest.mark.parametrize("first", ["the word", "the handoff"])
def test_a_receiver_that_wants_nothing_lets_the_sender_go_by_message(local: bool, first: str) -> None:
    # R14, a full prefix hit
    pair = Pair(local=local)

    def decline() -> None:
        pair.world.decline(pair.d, KEY, [pair.p])
        pair.world.settle()

    does: list[Callable[[], object]] = [decline, pair.hand_off]
    for do in does if first == "the word" else reversed(does):
        do()
    assert ends(pair.p) == [Reason.NOT_WANTED]


def test_a_reservation_for_a_transfer_that_failed_already_hears_so_at_once() -> None:
    pair = Pair()
    pair.hand_off()
    pair.cancel_handoff()
    pair.reserve()
    assert ends(pair.d) == [Reason.PEER_CANCELLED]


def test_a_handoff_that_is_refused_ends_the_reservation_that_waits_for_it() -> None:
    pair = Pair(limits=replace(LIMITS, halves_per_engine=1))
    pair.reserve(OTHER)
    pair.hand_off(KEY, computed=4)
    pair.hand_off(OTHER)
    assert ends(pair.p) == ends(pair.d) == [Reason.OVER_LIMIT]


def test_requests_that_share_one_transfer_are_told_so_and_leak_nothing() -> None:
    # R16: n > 1 dispatched as one transfer. One of them receives, the other recomputes.
    pair = Pair()
    pair.reserve()
    (e,) = pair.world.engine("E", "B")
    pair.world.reserve(e, KEY, [pair.p], 0, 7)
    pair.hand_off()
    pair.world.run()
    assert ends(pair.d) == [None]
    assert ends(e) == [Reason.DUPLICATE]
    pair.world.end()


# --- invariant 8: attempts are ordered -------------------------------------------------------------------


@both_ways
def test_the_next_attempt_writes_nothing_before_the_last_ones_writes_are_terminal(local: bool) -> None:
    # R7
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off(computed=4)
    before = pair.write
    pair.hand_off(TransferKey(KEY.transfer_id, 1))
    assert pair.world.writes() == [before]
    pair.world.complete(before)
    assert ends(pair.p) == [Reason.CANCELLED]
    pair.world.run()
    assert ends(pair.d) == [None]
    assert ends(pair.p) == [Reason.CANCELLED, None]


def test_what_a_former_attempt_wrote_is_not_counted_as_the_next_ones() -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off(computed=4)
    before = pair.write
    pair.hand_off(TransferKey(KEY.transfer_id, 1))
    pair.world.complete(before)
    (open_one,) = (targets for _, targets in pair.p.node.ledger.handoffs())
    assert [target.counts.chunks for target in open_one] == [0]
    pair.world.run()
    assert ends(pair.d) == [None]


def test_a_write_of_the_last_attempt_that_fails_ends_the_next_one_too() -> None:
    # It may yet land on top of what the next one writes.
    pair = Pair()
    pair.reserve()
    pair.hand_off(computed=4)
    pair.hand_off(TransferKey(KEY.transfer_id, 1))
    pair.world.fail(pair.write)
    pair.world.settle()
    assert ends(pair.d) == [Reason.TRANSPORT_FAILED]
    assert sorted(ends(pair.p), key=str) == [Reason.CANCELLED, Reason.TRANSPORT_FAILED]


def test_an_attempt_that_comes_after_its_transfer_has_failed_ends_with_the_same_fault() -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off(computed=4)
    pair.cancel_reservation()  # the write is still under way
    pair.hand_off(TransferKey(KEY.transfer_id, 1))
    assert ends(pair.p) == [Reason.PEER_CANCELLED]
    pair.world.run()
    assert ends(pair.p) == [Reason.PEER_CANCELLED, Reason.PEER_CANCELLED]
    pair.world.end()


def test_an_attempt_before_the_one_that_is_open_is_refused() -> None:
    pair = Pair()
    pair.hand_off(TransferKey(KEY.transfer_id, 1), computed=4)
    inc = pair.p.incarnation
    assert inc is not None
    (rejected,) = pair.p.node.ledger.handle(HandedOff(inc, KEY), pair.world.now)
    assert isinstance(rejected, TellRejected)
    assert rejected.fault.reason is Reason.STALE_ATTEMPT


# --- invariant 9: no hold-and-wait -----------------------------------------------------------------------


def test_prompts_that_nobody_comes_for_pin_no_more_than_their_share_and_the_oldest_go_first() -> None:
    # R38
    pair = Pair(blocks=16)  # a quarter: 4
    keys = [TransferKey(bytes([i]) * 16) for i in range(3)]
    held = [pair.hand_off(key, prompt=8) for key in keys]
    assert [h.told for h in held] == [1, 0, 0]
    assert ends(pair.p) == [Reason.OVER_LIMIT]
    pair.reserve(keys[0])
    assert ends(pair.d) == [Reason.OVER_LIMIT]


def test_a_matched_prompt_pins_nothing() -> None:
    pair = Pair(blocks=16)
    keys = [TransferKey(bytes([i]) * 16) for i in range(3)]
    for key in keys:
        pair.reserve(key, end=8)
    for key in keys:
        pair.hand_off(key, prompt=8)
    pair.world.run()
    assert ends(pair.p) == ends(pair.d) == [None] * 3


# --- several nodes ---------------------------------------------------------------------------------------


def test_a_reservation_with_two_senders_lands_when_both_parts_have() -> None:
    world = World()
    parts = world.engine("P", "A", "C", tp=2)
    (d,) = world.engine("D", "B")
    world.reserve(d, KEY, parts, 0, 7)
    for part in parts:
        held = world.hand_off(part, KEY, 7)
        assert held is not None
        world.append(part, held, 2, seal=True)
        for number in part.layouts:
            world.compute(part, held, number, 7, range(2))
        world.settle()
    first, second = world.writes()
    world.complete(first)
    world.settle()
    assert ends(d) == []
    world.complete(second)
    world.settle()
    assert ends(d) == [None]
    (account,) = (a for a in d.node.accounts if a.side is Side.RECEIVER)
    assert sorted(account.moved) == sorted(wire.out_name for wire in world.wires)
    assert set(account.moved.values()) == {account.counts.bytes // 2}
    world.end()


@pytest.mark.parametrize("local", [False, True], ids=["over a link", "on one node"])
def test_a_reservation_that_does_not_name_all_nodes_of_its_sender_does_not_land(local: bool) -> None:
    world = World()
    part, _ = world.engine("P", "A", "C", tp=2)
    (d,) = world.engine("D", "A" if local else "B")
    reservation = world.reserve(d, KEY, [part], 0, 7)
    handoff = world.hand_off(part, KEY, 7)
    assert reservation is not None
    assert handoff is not None
    world.append(part, handoff, 2, seal=True)
    world.compute(part, handoff, 0, 7, range(2))
    world.run()
    (fault,) = d.faults
    assert fault is not None
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.detail.startswith("all that its senders hold has landed, 14 bytes, but it takes 28")
    assert reservation.released
    world.end()


def test_a_reservation_ends_with_the_first_of_its_senders_that_fails_and_is_released_with_the_last() -> None:
    world = World()
    parts = world.engine("P", "A", "C", tp=2)
    (d,) = world.engine("D", "B")
    reservation = world.reserve(d, KEY, parts, 0, 7)
    assert reservation is not None
    for part in parts:
        held = world.hand_off(part, KEY, 7)
        assert held is not None
        world.append(part, held, 2, seal=True)
        for number in part.layouts:
            world.compute(part, held, number, 7, range(2))
        world.settle()
    _, second = world.writes()
    world.cancel(parts[0], KEY, Side.SENDER)
    world.settle()
    assert ends(d) == [Reason.PEER_CANCELLED]
    assert ends(parts[1]) == []
    assert not reservation.released
    world.run()
    assert reservation.released
    assert ends(second.source) == [Reason.PEER_CANCELLED]


def test_a_handoff_to_a_receiver_on_two_nodes_ends_when_both_have_all() -> None:
    world = World()
    (p,) = world.engine("P", "A")
    parts = world.engine("D", "B", "C", tp=2)
    handoff = world.hand_off(p, KEY, 7)
    assert handoff is not None
    world.append(p, handoff, 2, seal=True)
    world.compute(p, handoff, 0, 7, range(2))
    world.reserve(parts[0], KEY, [p], 0, 7)
    world.run()
    assert ends(parts[0]) == [None]
    assert not handoff.told
    world.reserve(parts[1], KEY, [p], 0, 7)
    world.run()
    assert ends(parts[1]) == ends(p) == [None]
    (account,) = (a for a in p.node.accounts if a.side is Side.SENDER)
    assert sorted(account.moved) == sorted(wire.in_name for wire in world.wires)
    assert set(account.moved.values()) == {account.counts.bytes // 2}


def test_a_handoff_of_whose_receiver_only_one_node_comes_ends_with_its_lease() -> None:
    world = World()
    (p,) = world.engine("P", "A")
    parts = world.engine("D", "B", "C", tp=2)
    handoff = world.hand_off(p, KEY, 7)
    assert handoff is not None
    world.append(p, handoff, 2, seal=True)
    world.compute(p, handoff, 0, 7, range(2))
    world.reserve(parts[0], KEY, [p], 0, 7)
    world.run()
    world.turn(LIMITS.lease)
    assert ends(p) == [Reason.EXPIRED]
    world.end()


# --- movers ----------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("whose", ["P", "D"])
@pytest.mark.parametrize("writes_first", [True, False])
def test_a_dead_mover_fails_its_transfers_at_once_and_the_next_ones_work(
    local: bool, whose: str, writes_first: bool
) -> None:
    pair = Pair(local=local)
    pair.reserve()
    pair.hand_off()
    node = pair.p.node if whose == "P" else pair.d.node
    pair.world.kill_mover(node, writes_first=writes_first)
    pair.world.run()
    assert len(ends(pair.d)) == len(ends(pair.p)) == 1
    assert None not in ends(pair.d) + ends(pair.p)
    pair.reserve(OTHER)
    pair.hand_off(OTHER)
    pair.world.run()
    assert ends(pair.d)[1:] == ends(pair.p)[1:] == [None]
    pair.world.end()


def test_a_handoff_goes_on_through_the_death_of_a_mover_that_had_nothing_of_it_in_flight() -> None:
    pair = Pair()
    handoff = pair.hand_off(computed=4)
    node = pair.p.node
    pair.world.kill_mover(node, writes_first=True)
    # Its engine knows nothing of it, and computes on.
    pair.world.append(pair.p, handoff, 1, seal=True)
    pair.world.speak(pair.p, None)
    pair.compute(handoff, 7)
    pair.reserve()
    pair.world.run()
    assert ends(pair.d) == ends(pair.p) == [None]


def test_a_reservation_waits_for_the_pools_of_its_engine() -> None:
    world = World()
    (p,) = world.engine("P", "A")
    (d,) = world.engine("D", "B", join=False)
    world.join(d, mapped=False)
    world.reserve(d, KEY, [p], 0, 7)
    world.speak(d, None)
    assert not d.node.reaches
    world.remap(d.node)
    assert d.node.reaches


def test_a_handoff_before_all_pools_of_its_engine_are_known_ends_at_once() -> None:
    world = World()
    (p,) = world.engine("P", "A", tp=2, join=False)
    world.join(p, mapped=False)
    world.remap(p.node)
    world.hand_off(p, KEY, 7)
    world.speak(p, None)
    assert ends(p) == [Reason.NO_SUCH_ENGINE]


# --- draining, attention, limits -------------------------------------------------------------------------


def test_a_node_that_drains_takes_nothing_new_ends_what_runs_and_says_when_it_is_idle() -> None:
    # R20
    pair = Pair()
    pair.reserve()
    handoff = pair.hand_off(computed=4)
    for node in pair.world.nodes.values():
        pair.world.feed(node, DrainBegan())
    pair.hand_off(OTHER)
    pair.reserve(OTHER)
    assert ends(pair.p) == ends(pair.d) == [Reason.DRAINING]
    assert not pair.p.node.ledger.idle
    pair.compute(handoff, 7)
    pair.world.run()
    assert ends(pair.p)[1:] == ends(pair.d)[1:] == [None]
    assert pair.p.node.ledger.idle
    assert pair.d.node.ledger.idle


def test_a_receiving_node_that_drains_reserves_nothing_though_its_sender_would() -> None:
    pair = Pair()
    pair.world.feed(pair.d.node, DrainBegan())
    pair.hand_off()
    pair.reserve()
    assert ends(pair.d) == [Reason.DRAINING]


@pytest.mark.parametrize("first", ["D", "P"])
def test_a_sending_node_that_drains_says_so_to_whoever_comes(first: str) -> None:
    pair = Pair()
    pair.world.feed(pair.p.node, DrainBegan())
    if first == "P":
        pair.hand_off()
        assert ends(pair.p) == [Reason.DRAINING]
    pair.reserve()
    assert ends(pair.d) == [Reason.DRAINING]


def test_what_a_draining_engine_does_over_is_not_new() -> None:
    pair = Pair()
    pair.reserve()
    pair.hand_off(computed=4)
    pair.world.feed(pair.p.node, DrainBegan())
    pair.hand_off(TransferKey(KEY.transfer_id, 1))
    pair.world.run()
    assert ends(pair.d) == [None]


def test_movers_look_for_bytes_as_eagerly_as_they_are_near() -> None:
    pair = Pair()
    ledger = pair.d.node.ledger
    levels = [ledger.attention]
    pair.reserve()
    levels.append(ledger.attention)
    pair.hand_off(computed=4)
    levels.append(ledger.attention)
    pair.cancel_reservation()
    levels.append(ledger.attention)
    pair.world.run()
    levels.append(ledger.attention)
    near = [Attention.EXPECTING, Attention.FILLING, Attention.FILLING]
    assert levels == [Attention.IDLE, *near, Attention.IDLE]


def test_phases_are_what_people_would_say() -> None:
    pair = Pair()
    pair.reserve()
    (half,) = pair.d.node.ledger.reservations()
    phases = [half.phase]
    handoff = pair.hand_off(computed=0)
    phases.append(half.phase)
    pair.compute(handoff, 4)
    phases.append(half.phase)
    pair.cancel_reservation()
    phases.append(half.phase)
    assert phases == [Phase.OPEN, Phase.MATCHED, Phase.MOVING, Phase.FENCING]
    assert pair.d.node.ledger.quarantined_blocks == 2


def test_an_engine_with_too_many_halves_is_told_so() -> None:
    pair = Pair(limits=replace(LIMITS, halves_per_engine=1))
    pair.reserve()
    pair.reserve(OTHER)
    assert ends(pair.d) == [Reason.OVER_LIMIT]


@pytest.mark.parametrize(
    ("start", "end", "blocks"),
    [
        (0, 0, (0,)),
        (5, 4, (0, 1)),
        (0, 9, (0, 1)),
        (0, 1 << 40, (0,)),
        (0, 7, (0, 99)),
        (0, 7, ()),
        (4, 8, (1, 1)),
    ],
)
def test_a_reservation_of_blocks_that_can_not_be_ends_at_once(
    start: int, end: int, blocks: tuple[int, ...]
) -> None:
    pair = Pair()
    inc = pair.d.incarnation
    assert inc is not None
    held = pair.world.reserve(pair.d, KEY, [pair.p], 0, 7)
    assert held is not None
    pair.d.said.clear()
    sender = (SenderAddress("P", LinkId("A")),)
    lists = (listed(start // 4 * 4, *blocks),) if blocks else ()
    pair.world.feed(pair.d.node, Reserved(inc, KEY, sender, start, end, lists))
    assert ends(pair.d) == [Reason.INVALID]
    assert held.released


@pytest.mark.parametrize(
    "senders",
    [(), ("D@A",), ("P@A", "P@A")],
    ids=["nobody", "itself", "one node twice"],
)
def test_a_reservation_names_its_senders_one_for_each_node(senders: tuple[str, ...]) -> None:
    pair = Pair()
    inc = pair.d.incarnation
    assert inc is not None
    pair.world.reserve(pair.d, KEY, [pair.p], 0, 7)
    pair.d.said.clear()
    named = tuple(SenderAddress(s[0], LinkId(s[2])) for s in senders)
    pair.world.feed(pair.d.node, Reserved(inc, KEY, named, 0, 7, (listed(0, 0, 1),)))
    assert ends(pair.d) == [Reason.INVALID]


# --- peers that mean no good -----------------------------------------------------------------------------


class Hostile:
    """A node with an engine P and an open handoff, and two peers that say what they like."""

    def __init__(self, limits: Limits = LIMITS, *, receiver_engine_id: str = "") -> None:
        self.ledger = Ledger(limits)
        self.p = Incarnation(b"p" * 16)
        self.ledger.handle(EngineJoined(self.p, "P", {"model": "m"}, 1, 1), 0)
        self.ledger.handle(PoolMapped(self.p, 0, LAYOUT), 0)
        opened = HandedOff(self.p, KEY, (listed(0, 1, 2),), receiver_engine_id=receiver_engine_id)
        self.ledger.handle(opened, 0)

    def view(self, name: str, **changes: object) -> ReceiverView:
        view = ReceiverView(name, Incarnation(name.encode() * 16), {"model": "m"}, 1, {0: LAYOUT})
        return replace(view, **changes)  # type: ignore[arg-type]

    def describe(self, link: str, name: str) -> Incarnation:
        view = self.view(name)
        self.ledger.handle(Described(LinkId(link), view, "P"), 0)
        return view.incarnation

    def announce(self, link: str, incarnation: Incarnation, **changes: object) -> list[object]:
        said = Announced(LinkId(link), incarnation, KEY, "P", 0, 7, (listed(0, 3, 4),))
        return list(self.ledger.handle(replace(said, **changes), 0))  # type: ignore[arg-type]


def reached(said: list[Instruction]) -> Reason | None:
    (item,) = (s for s in said if isinstance(s, SayReached))
    return item.reached.fault.reason if item.reached.fault is not None else None


def refusal(said: list[object]) -> Reason:
    (item,) = said
    assert isinstance(item, SayPeer)
    assert isinstance(item.item, PeerEnded)
    assert item.item.fenced
    return item.item.fault.reason


def test_what_an_engine_advances_and_never_opens_pushes_out_nothing_of_another_engine() -> None:
    node = Hostile(replace(LIMITS, early_per_engine=4))
    other = Incarnation(b"o" * 16)
    node.ledger.handle(EngineJoined(other, "O", {"model": "m"}, 1, 1), 0)
    node.ledger.handle(PoolMapped(other, 0, LAYOUT), 0)
    ahead = TransferKey(b"a" * 16)
    node.ledger.handle(Advanced(node.p, 0, ahead, 7, at=0), 0)
    keys = [TransferKey(count.to_bytes(16, "big")) for count in range(9)]
    for key in keys:
        node.ledger.handle(Advanced(other, 0, key, 7, at=0), 0)
    d = node.describe("B#1", "D")
    node.announce("B#1", d, key=ahead)
    said = node.ledger.handle(HandedOff(node.p, ahead, (listed(0, 1, 2),)), 0)
    assert any(isinstance(s, Post) for s in said)
    # What was not kept may have been the last word of its handoff: that would wait for ever.
    ended = [
        s.fault.reason if s.fault is not None else None
        for key in keys
        for s in node.ledger.handle(HandedOff(other, key, (listed(0, 1),), seal=3), 0)
        if isinstance(s, TellHandoffEnded)
    ]
    assert ended == [Reason.OVER_LIMIT] * 5


def test_what_one_engine_takes_back_pushes_out_nothing_that_another_took_back() -> None:
    node = Hostile(replace(LIMITS, tombs_per_engine=4))
    other = Incarnation(b"o" * 16)
    node.ledger.handle(EngineJoined(other, "O", {"model": "m"}, 1, 1), 0)
    late = TransferKey(b"a" * 16)
    node.ledger.handle(Cancelled(node.p, late, Side.SENDER, ""), 0)
    for count in range(9):
        node.ledger.handle(Cancelled(other, TransferKey(count.to_bytes(16, "big")), Side.SENDER, ""), 0)
    said = node.ledger.handle(HandedOff(node.p, late, (listed(0, 1, 2),)), 0)
    (ended,) = (s for s in said if isinstance(s, TellHandoffEnded))
    assert ended.fault is not None
    assert ended.fault.reason is Reason.CANCELLED


def test_of_an_engine_that_was_let_go_nothing_is_remembered() -> None:
    """Else one that comes again and again, each time another incarnation, would fill the node's memory."""
    node = Hostile()
    for count in range(9):
        key = TransferKey(count.to_bytes(16, "big"))
        node.ledger.handle(Advanced(node.p, 0, key, 7, at=0), 0)
        for side in Side.SENDER, Side.RECEIVER:
            node.ledger.handle(Cancelled(node.p, replace(key, attempt=1), side, ""), 0)
    assert LetGo(node.p) in node.ledger.handle(EngineLeft(node.p, "killed"), 0)
    sender, receiver = node.ledger._sender, node.ledger._receiver
    kept = (sender._early, sender._cancelled_early, sender._transfers.ended, sender._transfers.over)
    assert [len(each) for each in (*kept, receiver._over, receiver._cancelled_early)] == [0] * 6


def test_a_peer_can_not_announce_for_an_engine_that_it_did_not_describe() -> None:
    node = Hostile()
    d = node.describe("B#1", "D")
    assert refusal(node.announce("C#2", d)) is Reason.STALE_INCARNATION


def test_a_name_means_the_engine_that_bears_it_now_though_the_last_one_is_still_read() -> None:
    node = Hostile()
    d = node.describe("B#1", "D")
    node.ledger.handle(HandedOff(node.p, KEY, seal=7), 0)
    node.announce("B#1", d)
    node.ledger.handle(Advanced(node.p, 0, KEY, 7, at=0), 0)
    assert node.ledger.writes
    node.ledger.handle(EngineLeft(node.p, "killed"), 0)
    again = Incarnation(b"q" * 16)
    node.ledger.handle(EngineJoined(again, "P", {"model": "m"}, 1, 1), 0)
    node.ledger.handle(PoolMapped(again, 0, LAYOUT), 0)
    assert node.announce("B#1", d, key=OTHER) == []


def test_a_reservation_that_ended_is_not_opened_by_an_announcement_that_comes_again() -> None:
    """Its blocks are its engine's again: another incarnation's handoff must not be written into them."""
    node = Hostile()
    d = node.describe("B#1", "D")
    node.announce("B#1", d)
    node.ledger.handle(EngineLeft(node.p, "killed"), 0)
    again = Incarnation(b"q" * 16)
    node.ledger.handle(EngineJoined(again, "P", {"model": "m"}, 1, 1), 0)
    node.ledger.handle(PoolMapped(again, 0, LAYOUT), 0)
    node.ledger.handle(HandedOff(again, KEY, (listed(0, 1, 2),), seal=7), 0)
    node.ledger.handle(Advanced(again, 0, KEY, 7, at=0), 0)
    assert refusal(node.announce("B#1", d)) is Reason.ENGINE_GONE
    assert not node.ledger.writes


def test_a_reservation_that_was_refused_is_not_opened_by_an_announcement_that_comes_again() -> None:
    node = Hostile(receiver_engine_id="D")
    d = node.view("D").incarnation
    assert refusal(node.announce("B#1", d)) is Reason.STALE_INCARNATION
    node.describe("B#1", "D")
    assert refusal(node.announce("B#1", d)) is Reason.STALE_INCARNATION
    assert not node.ledger.writes


def test_a_reservation_that_landed_is_not_opened_by_an_announcement_that_comes_again() -> None:
    """Its receiver waits for an answer where its node forgets sooner, and lets its key be used once more."""
    node = Hostile()
    d = node.describe("B#1", "D")
    node.announce("B#1", d)
    node.ledger.handle(HandedOff(node.p, KEY, seal=7), 0)
    (post,) = (s for s in node.ledger.handle(Advanced(node.p, 0, KEY, 7, at=0), 0) if isinstance(s, Post))
    node.ledger.handle(WriteEnded(post.write, None, post.bytes, 1, 1, 2), 0)
    assert refusal(node.announce("B#1", d)) is Reason.DUPLICATE


def test_what_ended_on_one_link_is_remembered_however_many_end_on_another() -> None:
    node = Hostile(replace(LIMITS, tombs_per_link=4), receiver_engine_id="D")
    stranger = node.view("D").incarnation
    assert refusal(node.announce("B#1", stranger)) is Reason.STALE_INCARNATION
    for count in range(9):
        key = TransferKey(count.to_bytes(16, "big"))
        assert refusal(node.announce("C#2", stranger, key=key)) is Reason.STALE_INCARNATION
    node.describe("B#1", "D")
    assert refusal(node.announce("B#1", stranger)) is Reason.STALE_INCARNATION


def test_a_handoff_that_names_its_receiver_is_no_other_engines() -> None:
    node = Hostile(receiver_engine_id="D")
    assert refusal(node.announce("C#2", node.describe("C#2", "X"))) is Reason.FORBIDDEN


def test_a_second_engine_that_knows_a_transfer_gets_nothing_of_it() -> None:
    node = Hostile()
    node.announce("B#1", node.describe("B#1", "D"))
    assert refusal(node.announce("C#2", node.describe("C#2", "X"))) is Reason.DUPLICATE


def test_a_peer_can_not_withdraw_what_another_one_announced() -> None:
    node = Hostile()
    d = node.describe("B#1", "D")
    node.announce("B#1", d)
    fault = Fault(Reason.CANCELLED, "")
    assert node.ledger.handle(Withdrawn(LinkId("C#2"), d, KEY, "P", fault), 0) == []
    assert node.ledger.handle(Withdrawn(LinkId("C#2"), None, KEY, "P", fault), 0) == []
    ((handoff, targets),) = node.ledger.handoffs()
    assert handoff.fault is None
    assert len(targets) == 1


@pytest.mark.parametrize("how", ["takes it back", "leaves", "its link breaks"])
def test_who_copied_a_transfer_id_ends_nothing_that_another_engine_waits_for(how: str) -> None:
    """Also where the sender has not opened its handoff yet, and both wait for it."""
    node = Hostile()
    copied = TransferKey(b"t" * 16)
    node.announce("B#1", node.describe("B#1", "D"), key=copied)
    thief = node.describe("C#2", "X")
    assert node.announce("C#2", thief, key=copied) == []
    node.ledger.handle(
        {
            "takes it back": Withdrawn(LinkId("C#2"), thief, copied, "P", Fault(Reason.CANCELLED, "")),
            "leaves": ReceiverGone(LinkId("C#2"), thief, ""),
            "its link breaks": ReceiverLost(LinkId("C#2"), ""),
        }[how],
        0,
    )
    said = node.ledger.handle(HandedOff(node.p, copied, (listed(0, 1, 2),)), 0)
    (matched,) = (s.item for s in said if isinstance(s, SayPeer))
    assert isinstance(matched, PeerMatched)
    assert matched.link == "B#1"


def test_a_word_that_nothing_is_wanted_ends_nothing_that_another_peer_waits_for() -> None:
    node = Hostile()
    d = node.describe("B#1", "D")
    other = TransferKey(b"t" * 16)
    node.announce("B#1", d, key=other)
    fault = Fault(Reason.NOT_WANTED, "")
    assert node.ledger.handle(Withdrawn(LinkId("C#2"), None, other, "P", fault), 0) == []
    said = node.ledger.handle(HandedOff(node.p, other, (listed(0, 1, 2),)), 0)
    assert any(isinstance(s, SayPeer) and isinstance(s.item, PeerMatched) for s in said)


def test_an_engine_that_bears_the_name_of_one_on_another_node_is_refused() -> None:
    node = Hostile()
    first = node.view("D", node="B")
    assert reached(node.ledger.handle(Described(LinkId("B#1"), first, "P"), 0)) is None
    thief = node.view("D", node="C", incarnation=Incarnation(b"c" * 16))
    assert reached(node.ledger.handle(Described(LinkId("C#2"), thief, "P"), 0)) is Reason.DUPLICATE
    again = node.view("D", node="B", incarnation=Incarnation(b"b" * 16))
    assert reached(node.ledger.handle(Described(LinkId("B#3"), again, "P"), 0)) is None
    other_ranks = replace(thief, pools={1: LAYOUT}, world_size=2)
    assert reached(node.ledger.handle(Described(LinkId("C#2"), other_ranks, "P"), 0)) is None
    ours = node.view("P", node="C", incarnation=Incarnation(b"e" * 16))
    assert reached(node.ledger.handle(Described(LinkId("C#2"), ours, "P"), 0)) is Reason.DUPLICATE


def test_a_name_is_free_again_once_its_link_is_lost() -> None:
    node = Hostile()
    node.ledger.handle(Described(LinkId("B#1"), node.view("D", node="B"), "P"), 0)
    node.ledger.handle(ReceiverLost(LinkId("B#1"), "gone"), 0)
    moved = node.view("D", node="C")
    assert reached(node.ledger.handle(Described(LinkId("C#2"), moved, "P"), 0)) is None


def test_a_link_describes_no_more_engines_than_its_limit() -> None:
    node = Hostile(replace(LIMITS, engines_per_link=2))
    for index, wanted in enumerate((None, None, Reason.OVER_LIMIT)):
        view = node.view(f"D{index}", node="B", incarnation=Incarnation(bytes([index]) * 16))
        assert reached(node.ledger.handle(Described(LinkId("B#1"), view, "P"), 0)) is wanted
    elsewhere = node.view("E", node="C")
    assert reached(node.ledger.handle(Described(LinkId("C#2"), elsewhere, "P"), 0)) is None


@pytest.mark.parametrize(("limit", "most"), [("halves_per_link", 3), ("blocks_per_link", 6)])
def test_a_link_announces_no_more_than_its_limit_whatever_engines_it_is_for(limit: str, most: int) -> None:
    node = Hostile(replace(LIMITS, **{limit: most}))
    keys = [TransferKey(bytes([n]) * 16) for n in range(5)]
    of = [node.describe("B#1", name) for name in "XY"]
    for n, key in enumerate(keys[:3]):
        assert node.announce("B#1", of[n % 2], key=key) == []
    assert refusal(node.announce("B#1", of[0], key=keys[3])) is Reason.OVER_LIMIT
    assert node.announce("C#2", node.describe("C#2", "Z"), key=keys[3]) == []
    node.ledger.handle(Withdrawn(LinkId("B#1"), of[0], keys[0], "P", Fault(Reason.CANCELLED, "")), 0)
    assert node.announce("B#1", of[1], key=keys[4]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -1},
        {"start": 7},
        {"end": 1 << 62},
        {"blocks": ()},
        {"blocks": (listed(0, 3, 1 << 40),)},
        {"blocks": (listed(0, 3, -1),)},
        {"blocks": (listed(0, 3, 4, group=9),)},
        {"blocks": (listed(0, 3), listed(0, 4))},
    ],
    ids=str,
)
def test_an_announcement_of_what_can_not_be_is_refused(changes: dict[str, object]) -> None:
    node = Hostile()
    assert refusal(node.announce("B#1", node.describe("B#1", "D"), **changes)) is Reason.INVALID


def test_a_receiver_that_describes_itself_anew_is_judged_anew() -> None:
    node = Hostile()
    d = node.describe("B#1", "D")
    (said,) = node.ledger.handle(Described(LinkId("B#1"), node.view("D", fingerprint={"model": "n"}), "P"), 0)
    assert isinstance(said, SayReached)
    assert said.reached.fault is not None
    # What it said before still stands, as it was judged.
    assert isinstance(node.announce("B#1", d)[0], SayPeer)


def test_a_peer_that_announces_without_end_is_stopped() -> None:
    node = Hostile()
    ledger = Ledger(replace(LIMITS, halves_per_engine=3))
    node.ledger = ledger
    ledger.handle(EngineJoined(node.p, "P", {"model": "m"}, 1, 1), 0)
    ledger.handle(PoolMapped(node.p, 0, LAYOUT), 0)
    d = node.describe("B#1", "D")
    for i in range(3):
        assert node.announce("B#1", d, key=TransferKey(bytes([i]) * 16)) == []
    assert refusal(node.announce("B#1", d)) is Reason.OVER_LIMIT


def test_lost_links_of_nobody_are_nothing() -> None:
    assert Hostile().ledger.handle(LinkLost(LinkId("Z"), ""), 0) == []


def test_what_is_said_on_the_link_to_oneself_never_comes_out() -> None:
    ledger = Ledger(LIMITS)
    out = []
    for inc, name in ((Incarnation(b"p"), "P"), (Incarnation(b"d"), "D")):
        out += ledger.handle(EngineJoined(inc, name, {"model": "m"}, 1, 1), 0)
        out += ledger.handle(PoolMapped(inc, 0, LAYOUT), 0)
    sender = (SenderAddress("P", LOCAL),)
    out += ledger.handle(Reserved(Incarnation(b"d"), KEY, sender, 0, 7, (listed(0, 3, 4),)), 1)
    out += ledger.handle(HandedOff(Incarnation(b"p"), KEY, (listed(0, 1, 2),), seal=7), 2)
    out += ledger.handle(DrainBegan(), 3)
    assert {type(i).__name__ for i in out} == {"TellMatched"}
    assert not any(isinstance(i, Post | TellHandoffEnded) for i in out)
