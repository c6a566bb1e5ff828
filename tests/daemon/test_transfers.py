# SPDX-License-Identifier: Apache-2.0
"""Bytes between the pools of two engines: over two daemons and their movers, and over one."""

from __future__ import annotations

import numpy as np
import pytest

from kvpush_client.events import (
    Connected,
    Event,
    Fault,
    HandoffEnded,
    Matched,
    Reason,
    Rejected,
    ReservationEnded,
    Side,
    TransferKey,
)
from kvpushd.core.words import SECOND
from testing.rank import BLOCK, LAYERS, new_key
from tests.daemon.daemon_kit import Nodes, assert_same, eventually, landed, transfer

pytestmark = pytest.mark.nixl

SENT = range(4, 14)
INTO = range(40, 30, -1)  # ten blocks, none adjacent as the sender's are
END = 10 * BLOCK


def test_a_reservation_that_waits_is_filled_by_the_handoff(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.fill(SENT, 1)
    d.reserve(key, p, INTO, END)
    eventually(lambda: nodes.d.status().held.reservations)
    p.send(key, SENT, END)
    end = landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)
    assert end.counts.bytes == p.read(SENT, 0, END).nbytes


def test_a_handoff_that_waits_fills_the_reservation(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.fill(SENT, 2)
    p.send(key, SENT, END)
    eventually(lambda: nodes.p.status().held.handoffs, lambda handoffs: handoffs == 1)
    d.reserve(key, p, INTO, END)
    landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)


def test_both_sides_hear_that_they_match(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    assert d.wait_for(Matched, key).side is Side.RECEIVER
    assert p.wait_for(Matched, key).side is Side.SENDER
    p.send(key, [], END)
    landed(p, d, key)


def test_workers_hear_when_a_wait_ends_and_nothing_that_only_schedulers_wait_for(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = transfer(p, d)
    heard: list[Event] = []

    def hears() -> bool:
        heard.extend(d.ranks[0].session.poll())
        return any(isinstance(event, ReservationEnded) for event in heard)

    eventually(hears)
    assert [event.key for event in heard if not isinstance(event, Connected)] == [key]


def test_a_chunk_lands_before_the_next_is_final_and_the_timeline_says_so(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.fill(SENT, 3)
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT[:5])
    p.advance(key, 5 * BLOCK)
    # The first chunk's bytes are seen at the receiver while nothing beyond it is even named.
    first = p.read(SENT[:5], 0, 5 * BLOCK)
    eventually(lambda: np.array_equal(d.read(INTO[:5], 0, 5 * BLOCK), first))
    eventually(lambda: nodes.p.status().held.writes, lambda writes: writes == 0)
    p.hand_off(key, SENT[5:], END, start=5 * BLOCK)
    p.advance(key, END)
    end = landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)
    assert end.counts.chunks == 2
    assert end.counts.chunks_before_seal == 1
    times = next(t for t in nodes.d.transfers(key.transfer_id) if not t.sending).sender_times
    assert (
        times.first_post_unix_ns <= times.first_landed_unix_ns < times.sealed_unix_ns < times.landed_unix_ns
    )


@pytest.mark.parametrize("start", [BLOCK, 3 * BLOCK, 3 * BLOCK + 5])
def test_a_receiver_with_a_prefix_gets_only_the_rest_at_its_own_positions(nodes: Nodes, start: int) -> None:
    p, d = nodes.pair()
    key, end = new_key(), END - 3
    p.fill(SENT, 4)
    d.fill(INTO, 5)
    before = d.read(INTO, 0, END)
    d.reserve(key, p, INTO[start // BLOCK :], end, start)
    p.send(key, SENT, END)
    landed(p, d, key)
    assert_same(p, SENT, d, INTO, end, start)
    np.testing.assert_array_equal(d.read(INTO, 0, start), before[:start])
    np.testing.assert_array_equal(d.read(INTO, end, END), before[end:])


def test_many_transfers_at_once_each_land_where_they_belong(nodes: Nodes) -> None:
    p, d = nodes.pair(blocks=4096)
    keys = [new_key() for _ in range(40)]
    blocks = [range(20 * n, 20 * n + 1 + n % 20) for n in range(40)]
    for n, key in enumerate(keys):
        p.fill(blocks[n], n)
        d.reserve(key, p, blocks[n], len(blocks[n]) * BLOCK)
    for n, key in enumerate(reversed(keys)):
        mine = blocks[len(keys) - 1 - n]
        p.send(key, mine, len(mine) * BLOCK)
    for n, key in enumerate(keys):
        landed(p, d, key)
        assert_same(p, blocks[n], d, blocks[n], len(blocks[n]) * BLOCK)


def test_an_engine_sends_and_receives_at_the_same_time(nodes: Nodes) -> None:
    p, d = nodes.pair()
    there, back = new_key(), new_key()
    p.fill(SENT, 6)
    d.fill(range(100, 110), 7)
    d.reserve(there, p, INTO, END)
    p.reserve(back, d, range(60, 70), END)
    p.send(there, SENT, END)
    d.send(back, range(100, 110), END)
    landed(p, d, there)
    landed(d, p, back)
    assert_same(p, SENT, d, INTO, END)
    assert_same(d, range(100, 110), p, range(60, 70), END)


def test_engines_of_one_node_need_no_link(nodes: Nodes) -> None:
    p, d = nodes.engine(nodes.p), nodes.engine(nodes.p)
    links = nodes.p.status().held.links
    transfer(p, d)
    key = new_key()
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    p.advance(key, 3 * BLOCK)
    p.send(key, [], END)
    landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)
    assert nodes.p.status().held.links == links


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_that_hold_other_heads_are_filled_by_whoever_has_them(
    nodes: Nodes, senders: int, receivers: int
) -> None:
    p, d = nodes.engine(nodes.p, ranks=senders), nodes.engine(nodes.d, ranks=receivers)
    key = new_key()
    p.fill(SENT, 8)
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    p.advance(key, 4 * BLOCK)
    p.send(key, [], END)
    landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)


def test_one_rank_ahead_of_the_other_does_not_make_the_other_final(nodes: Nodes) -> None:
    p, d = nodes.engine(nodes.p, ranks=2), nodes.engine(nodes.d)
    key = new_key()
    p.fill(SENT, 9)
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT, END)
    p.ranks[0].session.advance(key, END)
    ahead = p.read(SENT, 0, END)[:, :, :1]
    eventually(lambda: np.array_equal(d.read(INTO, 0, END)[:, :, :1], ahead))
    p.fill(SENT, 10)  # the other rank computes only now; both are written anew
    p.ranks[1].session.advance(key, END)
    landed(p, d, key)
    np.testing.assert_array_equal(d.read(INTO, 0, END)[:, :, :1], ahead)
    np.testing.assert_array_equal(d.read(INTO, 0, END)[:, :, 1:], p.read(SENT, 0, END)[:, :, 1:])


def test_thousands_of_scattered_blocks_land_byte_for_byte(nodes: Nodes) -> None:
    blocks = 8192
    p, d = nodes.pair(blocks=blocks)
    key = new_key()
    rng = np.random.default_rng(11)
    sent, into = (rng.permutation(blocks)[:6000].tolist() for _ in range(2))
    p.fill(sent, 11)
    d.reserve(key, p, into, 6000 * BLOCK)
    p.hand_off(key, sent)
    p.advance(key, 6000 * BLOCK)
    d.wait_for(Matched, key)
    p.hand_off(key, [], 6000 * BLOCK)
    end = landed(p, d, key)
    assert_same(p, sent, d, into, 6000 * BLOCK)
    assert end.counts.runs <= LAYERS * 6000


def test_layers_move_as_they_become_final(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.fill(SENT, 12)
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT, END)
    p.advance(key, END, 0, 2)
    done = p.read(SENT, 0, END)[:, :2]
    eventually(lambda: np.array_equal(d.read(INTO, 0, END)[:, :2], done))
    eventually(lambda: nodes.p.status().held.writes, lambda writes: writes == 0)
    assert not d.read(INTO, 0, END)[:, 2:].any()
    p.advance(key, END, 2, 3)
    p.advance(key, END, 3, 4)
    end = landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)
    assert end.counts.chunks_before_seal >= 1


def test_the_last_attempt_of_a_preempted_prefill_is_what_lands(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    again = TransferKey(key.transfer_id, 1)
    p.fill(SENT, 13)
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    p.advance(key, 6 * BLOCK)
    first = p.read(SENT, 0, 6 * BLOCK)
    eventually(lambda: np.array_equal(d.read(INTO, 0, 6 * BLOCK), first))
    other = range(100, 110)
    p.fill(other, 14)
    p.hand_off(again, other, END)
    assert p.wait_for(HandoffEnded, key).fault == Fault(Reason.CANCELLED, "attempt 1 took over")
    p.advance(again, END)
    assert d.wait_for(ReservationEnded, key).fault is None
    assert p.wait_for(HandoffEnded, again).fault is None
    assert_same(p, other, d, INTO, END)


def test_a_former_attempt_can_not_come_back(nodes: Nodes) -> None:
    p = nodes.engine(nodes.p)
    key = new_key()
    p.hand_off(TransferKey(key.transfer_id, 1), SENT)
    eventually(lambda: nodes.p.status().held.handoffs)
    p.hand_off(key, SENT)
    end = p.wait_until(lambda e: isinstance(e, Rejected | HandoffEnded))
    assert end.fault is not None
    assert end.fault.reason is Reason.STALE_ATTEMPT


@pytest.mark.parametrize("linked", [True, False])
def test_a_decline_releases_the_sender_by_message(nodes: Nodes, linked: bool) -> None:
    p, d = nodes.pair()
    if linked:
        transfer(p, d)
    key = new_key()
    p.hand_off(key, SENT, END, lease=3600)
    p.advance(key, END)
    eventually(lambda: nodes.p.status().held.handoffs)
    d.scheduler.decline(key, [p.address])
    end = p.wait_for(HandoffEnded, key)
    assert end.fault is not None
    assert end.fault.reason is Reason.NOT_WANTED


def test_a_decline_that_overtakes_the_handoff_still_releases_it(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)
    key = new_key()
    d.scheduler.decline(key, [p.address])
    d.reserve(marker := new_key(), p, INTO, END)  # said after it, on the same link
    p.send(marker, SENT, END)
    landed(p, d, marker)
    p.hand_off(key, SENT, END, lease=3600)
    end = p.wait_for(HandoffEnded, key)
    assert end.fault is not None
    assert end.fault.reason is Reason.NOT_WANTED


def test_the_first_token_completes_the_timeline(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = transfer(p, d)
    d.scheduler.first_token(key)
    found = eventually(
        lambda: [t for t in nodes.d.transfers(key.transfer_id) if t.first_token_unix_ns],
    )[0]
    assert 0 < found.first_token_unix_ns - found.times.landed_unix_ns < 60 * SECOND
