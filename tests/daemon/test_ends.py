# SPDX-License-Identifier: Apache-2.0
"""Ends that are not good ones: both sides hear of them, and nothing is left."""

from __future__ import annotations

import pytest

from kvpush_client.events import (
    Fault,
    HandoffEnded,
    Matched,
    Reason,
    Rejected,
    ReservationEnded,
    ReservationReleased,
    Side,
)
from testing.rank import BLOCK, new_key
from tests.daemon.daemon_kit import LARGE, Nodes, assert_same, eventually, landed, transfer, under_way

pytestmark = pytest.mark.nixl

SENT = range(4, 14)
INTO = range(30, 40)
END = 10 * BLOCK


def reason(end: ReservationEnded | HandoffEnded | Rejected) -> Reason:
    assert end.fault is not None, end
    return end.fault.reason


# --- the receiver takes it back --------------------------------------------------------------------------


def test_an_abort_before_any_match_ends_the_reservation_at_once(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    d.scheduler.cancel(key, Side.RECEIVER, "the client left")
    end = d.wait_for(ReservationEnded, key)
    assert end.fault == Fault(Reason.CANCELLED, "the client left")
    if not end.released:
        d.wait_for(ReservationReleased, key)


def test_an_abort_before_any_match_also_ends_the_handoff_that_comes_later(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)
    key = new_key()
    d.reserve(key, p, INTO, END)
    eventually(lambda: nodes.d.status().held.reservations)
    d.scheduler.cancel(key, Side.RECEIVER)
    d.wait_for(ReservationEnded, key)
    eventually(lambda: nodes.d.status().held.reservations == 0)
    p.hand_off(key, SENT, END, lease=3600)
    assert reason(p.wait_for(HandoffEnded, key)) is Reason.PEER_CANCELLED


def test_an_abort_of_a_matched_reservation_ends_the_handoff_by_message(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    d.wait_for(Matched, key)
    d.scheduler.cancel(key, Side.RECEIVER, "the client left")
    assert reason(d.wait_for(ReservationEnded, key)) is Reason.CANCELLED
    assert reason(p.wait_for(HandoffEnded, key)) is Reason.PEER_CANCELLED


def test_an_abort_while_bytes_are_under_way_holds_the_blocks_until_the_fence(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    with under_way(nodes, p, d) as flight:
        d.scheduler.cancel(flight.key, Side.RECEIVER)
        end = d.wait_for(ReservationEnded, flight.key)
        assert reason(end) is Reason.CANCELLED
        assert not end.released
        assert nodes.d.status().held.quarantined_blocks == len(flight.ids)
        assert nodes.p.status().held.writes
    d.wait_for(ReservationReleased, flight.key)
    d.fill(flight.ids, 22)  # the next request's
    assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.PEER_CANCELLED
    wanted = d.read(flight.ids, 0, flight.end)
    transfer(*nodes.pair())
    assert (d.read(flight.ids, 0, flight.end) == wanted).all()


def test_an_abort_after_the_end_changes_nothing(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = transfer(p, d)
    d.scheduler.cancel(key, Side.RECEIVER)
    p.scheduler.cancel(key, Side.SENDER)
    transfer(p, d, seed=2)
    assert not [e for e in d.heard + p.heard if getattr(e, "key", None) == key and not isinstance(e, Matched)]


def test_a_thousand_aborts_at_once_leave_nothing(nodes: Nodes) -> None:
    p, d = nodes.pair(blocks=4096)
    keys = [new_key() for _ in range(1000)]
    for n, key in enumerate(keys):
        d.reserve(key, p, [n], BLOCK)
        p.hand_off(key, [n])
    d.wait_for(Matched, keys[499])  # so half of them are matched; the others' aborts may come before
    for key in keys:
        d.scheduler.cancel(key, Side.RECEIVER)
    for key in keys:
        end = d.wait_for(ReservationEnded, key)
        if not end.released:
            d.wait_for(ReservationReleased, key)
        assert reason(p.wait_for(HandoffEnded, key)) in (Reason.PEER_CANCELLED, Reason.CANCELLED)


# --- the sender takes it back ----------------------------------------------------------------------------


def test_a_sender_that_cancels_ends_the_reservation_and_its_blocks_are_free(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    d.wait_for(Matched, key)
    p.scheduler.cancel(key, Side.SENDER, "preempted")
    end = d.wait_for(ReservationEnded, key)
    assert reason(end) is Reason.PEER_CANCELLED
    assert end.released
    assert reason(p.wait_for(HandoffEnded, key)) is Reason.CANCELLED


def test_a_sender_that_cancels_keeps_its_blocks_until_nothing_reads_them(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    with under_way(nodes, p, d) as flight:
        p.scheduler.cancel(flight.key, Side.SENDER)
        end = d.wait_for(ReservationEnded, flight.key)
        assert reason(end) is Reason.PEER_CANCELLED
        assert not end.released
        assert not [e for e in p.heard if isinstance(e, HandoffEnded)]
        assert nodes.p.status().held.writes
    assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.CANCELLED
    d.wait_for(ReservationReleased, flight.key)


def test_a_seal_that_comprises_less_than_is_wanted_ends_both(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    p.send(key, SENT[:5], 5 * BLOCK)
    assert reason(d.wait_for(ReservationEnded, key)) is Reason.POSITIONS_MISSING
    assert reason(p.wait_for(HandoffEnded, key)) is Reason.POSITIONS_MISSING


def test_a_worker_that_names_layers_which_its_pool_does_not_have_ends_both_and_hears_which(
    nodes: Nodes,
) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT, END)
    p.advance(key, END, first_layer=0, end_layer=99)
    for end in (d.wait_for(ReservationEnded, key), p.wait_for(HandoffEnded, key)):
        assert reason(end) is Reason.INVALID
        assert end.fault is not None
        assert "advanced layers [0, 99)" in end.fault.detail
    transfer(p, d)


# --- nobody comes ----------------------------------------------------------------------------------------


def test_reservations_that_nobody_fills_end_with_their_lease(nodes: Nodes) -> None:
    p, d = nodes.pair()
    keys = [new_key() for _ in range(20)]
    for n, key in enumerate(keys):
        d.reserve(key, p, [n], BLOCK, lease=0.3)
    for key in keys:
        end = d.wait_for(ReservationEnded, key)
        assert reason(end) is Reason.EXPIRED
        if not end.released:
            d.wait_for(ReservationReleased, key)


def test_a_handoff_that_nobody_wants_ends_with_its_lease_from_the_seal_on(nodes: Nodes) -> None:
    p = nodes.engine(nodes.p)
    open_one, sealed = new_key(), new_key()
    p.hand_off(open_one, SENT[:2], lease=0.2)
    p.hand_off(sealed, SENT[2:], END, lease=0.2)
    assert reason(p.wait_for(HandoffEnded, sealed)) is Reason.EXPIRED
    assert nodes.p.status().held.handoffs == 1
    p.scheduler.cancel(open_one, Side.SENDER)
    assert reason(p.wait_for(HandoffEnded, open_one)) is Reason.CANCELLED


def test_an_expired_handoff_is_refused_to_the_reservation_that_comes_too_late(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.hand_off(key, SENT, END, lease=0.1)
    p.advance(key, END)
    assert reason(p.wait_for(HandoffEnded, key)) is Reason.EXPIRED
    d.reserve(key, p, INTO, END, lease=3600)
    end = d.wait_for(ReservationEnded, key)
    assert reason(end) is Reason.EXPIRED
    assert end.released
    assert not d.read(INTO, 0, END).any()


def test_unmatched_handoffs_pin_at_most_their_share_and_the_oldest_goes_first(nodes: Nodes) -> None:
    p = nodes.engine(nodes.p, blocks=100)
    first, second, third = new_key(), new_key(), new_key()
    p.hand_off(first, range(10), 10 * BLOCK, lease=3600)
    p.hand_off(second, range(10, 20), 10 * BLOCK, lease=3600)
    p.hand_off(third, range(20, 30), 10 * BLOCK, lease=3600)
    assert reason(p.wait_for(HandoffEnded, first)) is Reason.OVER_LIMIT
    assert nodes.p.status().held.handoffs == 2


def test_a_sender_that_no_node_has_is_said_at_once(nodes: Nodes) -> None:
    d = nodes.engine(nodes.d)
    p = nodes.engine(nodes.p)
    unknown = type(p.address)("nobody", "127.0.0.1", nodes.p.port)
    key = new_key()
    d.reserve(key, unknown, INTO, END, lease=3600)
    end = d.wait_for(ReservationEnded, key)
    assert reason(end) is Reason.NO_SUCH_ENGINE
    assert end.released


def test_a_node_that_is_not_there_is_said_at_once(nodes: Nodes) -> None:
    d = nodes.engine(nodes.d)
    nowhere = type(d.address)("anyone", "127.0.0.1", 1)
    key = new_key()
    d.reserve(key, nowhere, INTO, END, lease=3600)
    end = d.wait_for(ReservationEnded, key)
    assert reason(end) is Reason.PEER_UNREACHABLE
    assert end.released


# --- doubles ---------------------------------------------------------------------------------------------


def test_the_same_key_again_with_other_blocks_is_rejected_and_the_first_goes_on(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, INTO, END)
    d.reserve(key, p, range(100, 110), END)
    assert reason(d.wait_for(Rejected, key)) is Reason.DUPLICATE
    p.fill(SENT, 23)
    p.send(key, SENT, END)
    landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)
    assert not d.read(range(100, 110), 0, END).any()


def test_a_second_receiver_of_one_transfer_is_refused_and_the_first_goes_on(nodes: Nodes) -> None:
    p, d = nodes.pair()
    other = nodes.engine(nodes.d)
    key = new_key()
    p.fill(SENT, 24)
    d.reserve(key, p, INTO, END)
    p.hand_off(key, SENT)
    d.wait_for(Matched, key)
    other.reserve(key, p, INTO, END)
    assert reason(other.wait_for(ReservationEnded, key)) is Reason.DUPLICATE
    p.send(key, [], END)
    landed(p, d, key)
    assert_same(p, SENT, d, INTO, END)


def test_blocks_that_the_pool_does_not_have_end_the_reservation_with_the_reason(nodes: Nodes) -> None:
    p, d = nodes.pair(blocks=64)
    key = new_key()
    d.reserve(key, p, range(60, 70), END)
    end = d.wait_for(ReservationEnded, key)
    assert reason(end) is Reason.INVALID
    assert end.released


def test_a_mover_that_is_stopped_for_a_moment_only_delays(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    with under_way(nodes, p, d) as flight:
        p.hand_off(flight.key, [], flight.end)
    landed(p, d, flight.key)
    assert_same(p, flight.ids, d, flight.ids, flight.end)
