# SPDX-License-Identifier: Apache-2.0
"""Processes that die, or stand still, while bytes are under way."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvpush_client.events import (
    Disconnected,
    HandoffEnded,
    Matched,
    Reason,
    ReservationEnded,
    ReservationReleased,
    TransferKey,
)
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.daemon_kit import (
    LARGE,
    FarEngine,
    Nodes,
    alive,
    assert_same,
    eventually,
    landed,
    leftovers,
    spare_of,
    stopped,
    transfer,
    under_way,
)

pytestmark = pytest.mark.nixl


def reason(end: ReservationEnded | HandoffEnded) -> Reason:
    assert end.fault is not None, end
    return end.fault.reason


def released(d: Engine, key: TransferKey) -> None:
    """Waits for the end of a reservation whose end has not been heard, and for its release."""
    if not d.wait_for(ReservationEnded, key).released:
        d.wait_for(ReservationReleased, key)


class Reused:
    """Blocks that were given to the next request as soon as they were released."""

    def __init__(self, d: Engine, ids: Sequence[int]) -> None:
        d.fill(ids, 99)
        self._d, self._ids = d, ids
        self._wanted = d.read(ids, 0, len(ids) * BLOCK)

    def are_intact(self) -> None:
        np.testing.assert_array_equal(self._d.read(self._ids, 0, len(self._ids) * BLOCK), self._wanted)


def again(p: Engine, d: Engine) -> None:
    """Both engines have come back by themselves, and the next transfer lands, in either direction."""
    eventually(lambda: p.ready() and d.ready())
    transfer(p, d, seed=31)
    transfer(d, p, seed=32)


def given_up(node: Node, other: Node) -> None:
    """Waits until a node has no link with another one up, neither way: each way has a silence of its own."""
    eventually(
        lambda: [peer for peer in node.peers() if peer.up and peer.node == other.name], lambda up: not up
    )


def beside(nodes: Nodes) -> tuple[Engine, Engine, TransferKey]:
    """A transfer from P's node to a third one, matched, that has nothing to do with what happens to D."""
    p, e = nodes.engine(nodes.p), nodes.engine(nodes.e)
    key = new_key()
    p.fill(range(8), 41)
    e.reserve(key, p, range(8), 8 * BLOCK)
    p.hand_off(key, range(8))
    p.advance(key, 3 * BLOCK)
    return p, e, key


def goes_on(p: Engine, e: Engine, key: TransferKey) -> None:
    p.send(key, [], 8 * BLOCK)
    landed(p, e, key)
    assert_same(p, range(8), e, range(8), 8 * BLOCK)


# --- daemons ---------------------------------------------------------------------------------------------


def test_a_killed_sending_daemon_ends_the_reservation_and_the_fence_releases_its_blocks(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    destroyed = nodes.d.metric("kvpush_inlets_destroyed_total")
    mover = nodes.p.mover_pid
    with under_way(nodes, p, d) as flight:
        nodes.p.kill()
        end = d.wait_for(ReservationEnded, flight.key)
        assert reason(end) is Reason.PEER_UNREACHABLE
        assert not end.released
        p.wait_for(Disconnected)
        assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.PEER_UNREACHABLE
        assert not alive(mover)
    d.wait_for(ReservationReleased, flight.key)
    reused = Reused(d, flight.ids[:128])
    nodes.p.start()
    eventually(p.ready)
    key = new_key()
    d.reserve(key, p, flight.ids[128:132], 4 * BLOCK)
    p.send(key, range(4), 4 * BLOCK)
    landed(p, d, key)
    reused.are_intact()
    assert nodes.d.metric("kvpush_inlets_destroyed_total") == destroyed + 1
    again(p, d)


def test_a_killed_receiving_daemon_ends_the_handoff_and_leaves_other_peers_alone(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    other = beside(nodes)
    mover = nodes.d.mover_pid
    with under_way(nodes, p, d) as flight:
        nodes.d.kill()
        # Daemon and mover die together: the broken link and the failed write race to P's daemon.
        end = p.wait_for(HandoffEnded, flight.key)
        assert reason(end) in (Reason.PEER_UNREACHABLE, Reason.TRANSPORT_FAILED)
        assert reason(d.wait_for(ReservationEnded, flight.key)) is Reason.PEER_UNREACHABLE
        d.wait_for(ReservationReleased, flight.key)
        assert not alive(mover)
    reused = Reused(d, flight.ids)
    goes_on(*other)
    reused.are_intact()
    nodes.d.start()
    again(p, d)
    assert nodes.p.status().movers[0].restarts == 0


def test_a_killed_receiving_daemon_ends_a_handoff_of_which_nothing_was_under_way(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, range(8), 8 * BLOCK)
    p.hand_off(key, range(8))
    p.wait_for(Matched, key)
    nodes.d.kill()
    # Nothing but the broken link tells.
    assert reason(p.wait_for(HandoffEnded, key)) is Reason.PEER_UNREACHABLE
    released(d, key)
    nodes.d.start()
    again(p, d)


def test_another_daemon_in_the_place_of_a_killed_one_is_reached(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)
    nodes.p.kill()
    with Node("another", nodes.p.runtime_dir.parent, peer_port=nodes.p.port) as instead:
        instead.port = nodes.p.port
        q = nodes.stack.enter_context(Engine(instead, p.engine_id))
        transfer(q, d)
        transfer(d, q, seed=2)
        q.close()
        instead.close()
        nodes.p.start()
        again(p, d)


def test_a_sending_daemon_that_stands_still_is_fenced_though_its_mover_goes_on(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    with under_way(nodes, p, d) as flight:
        os.kill(nodes.p.pid, signal.SIGSTOP)
        assert reason(d.wait_for(ReservationEnded, flight.key)) is Reason.PEER_UNREACHABLE
    try:
        d.wait_for(ReservationReleased, flight.key)
        reused = Reused(d, flight.ids[8:])
        given_up(nodes.d, nodes.p)
    finally:
        os.kill(nodes.p.pid, signal.SIGCONT)
    p.wait_for(HandoffEnded, flight.key)
    given_up(nodes.p, nodes.d)
    again(p, d)
    reused.are_intact()
    assert nodes.p.status().movers[0].restarts == 0


def test_a_receiving_daemon_that_stands_still_ends_the_handoff_and_its_engine_comes_back(
    nodes: Nodes,
) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, range(8), 8 * BLOCK)
    p.hand_off(key, range(8))
    d.wait_for(Matched, key)
    with stopped(nodes.d.pid):
        assert reason(p.wait_for(HandoffEnded, key)) is Reason.PEER_UNREACHABLE
        given_up(nodes.p, nodes.d)
    released(d, key)
    given_up(nodes.d, nodes.p)
    again(p, d)
    assert nodes.d.status().movers[0].restarts == 0


# --- movers ----------------------------------------------------------------------------------------------


def test_a_killed_sending_mover_is_replaced_and_the_next_transfer_moves(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    restarts = nodes.p.status().movers[0].restarts
    with under_way(nodes, p, d) as flight:
        os.kill(nodes.p.mover_pid, signal.SIGKILL)
        assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.MOVER_DIED
        end = d.wait_for(ReservationEnded, flight.key)
        assert reason(end) in (Reason.MOVER_DIED, Reason.PEER_UNREACHABLE)
        assert not end.released
    d.wait_for(ReservationReleased, flight.key)
    reused = Reused(d, flight.ids[8:])
    eventually(lambda: nodes.p.http("/readyz")[0] == 200)
    assert nodes.p.status().movers[0].restarts == restarts + 1
    again(p, d)
    reused.are_intact()


def test_a_killed_receiving_mover_is_the_fence_itself(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    other = beside(nodes)
    restarts = nodes.d.status().movers[0].restarts
    with under_way(nodes, p, d) as flight:
        os.kill(nodes.d.mover_pid, signal.SIGKILL)
        end = d.wait_for(ReservationEnded, flight.key)
        assert reason(end) in (Reason.MOVER_DIED, Reason.TRANSPORT_FAILED)  # whoever notices first
        if not end.released:
            d.wait_for(ReservationReleased, flight.key)
    reused = Reused(d, flight.ids[8:])
    p.wait_for(HandoffEnded, flight.key)
    goes_on(*other)
    eventually(lambda: nodes.d.http("/readyz")[0] == 200)
    assert nodes.d.status().movers[0].restarts == restarts + 1
    again(p, d)
    reused.are_intact()


def test_a_spare_takes_the_place_of_a_mover_and_there_is_another_one_afterwards(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)
    for seed in (44, 45):
        spare = spare_of(nodes.p)
        os.kill(nodes.p.mover_pid, signal.SIGKILL)
        eventually(lambda: nodes.p.mover_pid, spare.__eq__)
        eventually(lambda: p.ready() and d.ready())
        transfer(p, d, seed=seed)
        assert spare_of(nodes.p) != spare
    assert len(nodes.p.status().movers) == 1


def test_a_mover_is_replaced_though_its_spare_died_too(nodes: Nodes) -> None:
    p, d = nodes.pair()
    mover, spare = nodes.d.mover_pid, spare_of(nodes.d)
    os.kill(spare, signal.SIGKILL)
    os.kill(mover, signal.SIGKILL)
    eventually(lambda: nodes.d.mover_pid, lambda pid: pid not in (0, mover, spare))
    again(p, d)
    assert not alive(spare)


def test_a_mover_is_replaced_though_its_spare_stands_still(nodes: Nodes) -> None:
    p, d = nodes.pair()
    mover, spare = nodes.d.mover_pid, spare_of(nodes.d)
    os.kill(spare, signal.SIGSTOP)
    os.kill(mover, signal.SIGKILL)
    eventually(lambda: nodes.d.mover_pid, lambda pid: pid not in (0, mover, spare))
    again(p, d)
    assert not alive(spare)


def test_a_handoff_that_nobody_has_come_for_outlives_its_mover(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.fill(range(8), 42)
    p.send(key, range(8), 8 * BLOCK)
    eventually(lambda: nodes.p.status().held.handoffs)
    with stopped(spare_of(nodes.p)):
        os.kill(nodes.p.mover_pid, signal.SIGKILL)
        eventually(lambda: nodes.p.http("/readyz")[0] == 503)
    eventually(lambda: nodes.p.http("/readyz")[0] == 200)
    d.reserve(key, p, range(8), 8 * BLOCK)
    landed(p, d, key)
    assert_same(p, range(8), d, range(8), 8 * BLOCK)


def test_a_reservation_made_while_the_mover_is_replaced_waits_for_the_next_one(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    p.fill(range(8), 43)
    p.send(key, range(8), 8 * BLOCK)
    with stopped(spare_of(nodes.d)):
        os.kill(nodes.d.mover_pid, signal.SIGKILL)
        eventually(lambda: nodes.d.http("/readyz")[0] == 503)
        d.reserve(key, p, range(8), 8 * BLOCK)
        eventually(lambda: nodes.d.status().held.reservations)
    landed(p, d, key)
    assert_same(p, range(8), d, range(8), 8 * BLOCK)


def test_a_sending_mover_that_stands_still_is_killed_and_both_sides_hear(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    with under_way(nodes, p, d) as flight:
        mover = nodes.p.mover_pid
        os.kill(mover, signal.SIGSTOP)
    assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.MOVER_DIED
    assert not alive(mover)
    released(d, flight.key)
    reused = Reused(d, flight.ids[8:])
    eventually(lambda: nodes.p.http("/readyz")[0] == 200)
    again(p, d)
    reused.are_intact()


def test_a_receiving_host_that_is_gone_costs_no_transfer_to_another(tmp_path: Path) -> None:
    with ExitStack() as stack:
        started = [Node(name, tmp_path, lease=7, link_silence=3).launch() for name in ("p", "d", "e")]
        for node in started:
            stack.callback(node.close)
            node.wait_ready()
        nodes = Nodes(*started, stack)
        p, d = nodes.pair(**LARGE)
        e = nodes.engine(nodes.e, **LARGE)
        with under_way(nodes, p, d) as flight, stopped(nodes.d.pid):
            mover = nodes.p.mover_pid
            # Two leases after the write was posted nothing reads it any more.
            assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.PEER_UNREACHABLE
            transfer(p, e)
            assert nodes.p.mover_pid == mover
        again(p, d)


# --- engines ---------------------------------------------------------------------------------------------


def test_a_killed_sending_engine_ends_the_reservation_and_its_memory_is_let_go(nodes: Nodes) -> None:
    p, d = nodes.far_engine(nodes.p, **LARGE), nodes.engine(nodes.d, **LARGE)
    with under_way(nodes, p, d) as flight:
        p.kill()
        end = d.wait_for(ReservationEnded, flight.key)
        assert reason(end) is Reason.ENGINE_GONE
        assert not end.released
        assert nodes.p.status().movers[0].pools  # writes still read it
    d.wait_for(ReservationReleased, flight.key)
    reused = Reused(d, flight.ids[8:])
    eventually(lambda: leftovers(nodes.p), lambda left: not left)
    again(nodes.engine(nodes.p, **LARGE), d)
    reused.are_intact()


def test_a_killed_receiving_engine_ends_the_handoff_and_its_memory_is_let_go_after_the_fence(
    nodes: Nodes,
) -> None:
    p, d = nodes.engine(nodes.p, **LARGE), nodes.far_engine(nodes.d, **LARGE)
    with under_way(nodes, p, d) as flight:
        d.kill()
        eventually(lambda: nodes.d.status().held.engines == 0)
        assert nodes.d.status().movers[0].pools  # bytes may still land in it
    assert reason(p.wait_for(HandoffEnded, flight.key)) is Reason.ENGINE_GONE
    eventually(lambda: leftovers(nodes.d), lambda left: not left)
    again(p, nodes.engine(nodes.d, **LARGE))


@pytest.mark.parametrize("silence", [3.0, pytest.param(30.0, marks=pytest.mark.long, id="as installed")])
def test_an_engine_that_stands_still_is_given_up_after_its_silence(tmp_path: Path, silence: float) -> None:
    # For so long a busy machine keeps no link alive that is given up within a second.
    with (
        Node("here", tmp_path, engine_silence=silence) as here,
        Node("there", tmp_path) as there,
        FarEngine(here, "P") as p,
        Engine(there, "D") as d,
    ):
        key = new_key()
        d.reserve(key, p.call("where"), range(8), 8 * BLOCK)
        p.call("hand_off", key, range(8))
        d.wait_for(Matched, key)
        with stopped(p.pid):
            assert reason(d.wait_for(ReservationEnded, key, timeout=90)) is Reason.ENGINE_GONE
            eventually(lambda: leftovers(here), lambda left: not left)
        eventually(lambda: p.call("ready"))


def test_a_receiving_engine_that_stands_still_gets_what_is_sealed_and_is_given_up_after_its_silence(
    tmp_path: Path,
) -> None:
    with (
        Node("here", tmp_path) as here,
        Node("there", tmp_path, engine_silence=3) as there,
        Engine(here, "P") as p,
        FarEngine(there, "D") as d,
    ):
        sealed, waiting = new_key(), new_key()
        p.fill(range(8), 7)
        d.call("reserve", sealed, p.where(), range(8), 8 * BLOCK)
        d.call("reserve", waiting, p.where(), range(8, 16), 8 * BLOCK)
        p.hand_off(waiting, range(8, 16))
        p.wait_for(Matched, waiting)
        with stopped(d.pid):
            p.send(sealed, range(8), 8 * BLOCK)
            assert p.wait_for(HandoffEnded, sealed).fault is None
            assert reason(p.wait_for(HandoffEnded, waiting)) is Reason.ENGINE_GONE
            eventually(lambda: leftovers(there), lambda left: not left)
        eventually(lambda: d.call("ready"))


def test_a_killed_engine_comes_back_under_its_name_as_another_incarnation(nodes: Nodes) -> None:
    d = nodes.engine(nodes.d)
    first = nodes.far_engine(nodes.p)
    first.kill()
    second = nodes.stack.enter_context(Engine(nodes.p, first.engine_id))
    transfer(second, d)
