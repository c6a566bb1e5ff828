# SPDX-License-Identifier: Apache-2.0
"""What the node says of itself: readiness, metrics, lists."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from kvpush_client._proto import admin_pb2
from kvpush_client.events import HandoffEnded, Reason, ReservationEnded, ReservationReleased
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.daemon_kit import LARGE, Nodes, descriptors, eventually, spare_of, stopped, transfer

pytestmark = pytest.mark.nixl


def test_a_node_is_not_ready_while_its_mover_is_replaced(nodes: Nodes) -> None:
    transfer(*nodes.pair())
    assert nodes.p.http("/readyz") == (200, "ready\n")
    restarts = nodes.p.metric("kvpush_mover_restarts_total")
    with stopped(spare_of(nodes.p)):
        os.kill(nodes.p.mover_pid, signal.SIGKILL)
        _, text = eventually(lambda: nodes.p.http("/readyz"), lambda answer: answer[0] == 503)
    assert "the mover" in text
    eventually(lambda: nodes.p.http("/readyz")[0] == 200)
    assert nodes.p.http("/healthz") == (200, "ok\n")
    assert nodes.p.metric("kvpush_mover_restarts_total") == restarts + 1


def test_a_node_is_not_ready_while_its_mover_stands_still(nodes: Nodes) -> None:
    mover = nodes.p.mover_pid
    with stopped(mover):
        _, text = eventually(lambda: nodes.p.http("/readyz"), lambda answer: answer[0] == 503)
        assert "silent" in text
    eventually(lambda: nodes.p.http("/readyz")[0] == 200)


def test_a_transfer_moves_the_counters_of_both_sides(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)
    size = 4 * BLOCK * p.read([0], 0, 1).nbytes
    assert nodes.p.metric("kvpush_sent_bytes_total", engine=p.engine_id) == size
    assert nodes.d.metric("kvpush_received_bytes_total", engine=d.engine_id) == size
    assert nodes.p.metric("kvpush_transfers_total", engine=p.engine_id) == 1
    assert nodes.d.metric("kvpush_transfers_total", engine=d.engine_id) == 1
    totals = nodes.p.status().totals.bytes_sent, nodes.d.status().totals.bytes_received
    transfer(p, d, seed=2)
    assert nodes.p.status().totals.bytes_sent - totals[0] == size
    assert nodes.d.status().totals.bytes_received - totals[1] == size


def test_an_engine_that_leaves_in_order_destroys_no_inlet_as_a_fence(nodes: Nodes) -> None:
    destroyed = nodes.d.metric("kvpush_inlets_destroyed_total")
    p, d = nodes.pair()
    transfer(p, d)
    assert nodes.d.status().movers[0].inlets == 1
    d.close()
    eventually(lambda: nodes.d.status().movers[0].inlets == 0)
    assert nodes.d.metric("kvpush_inlets_destroyed_total") == destroyed


def handles(node: Node) -> tuple[int, int, int]:
    mover = node.status().movers[0]
    return mover.outlets, mover.transfers, mover.registrations


def test_what_a_mover_has_of_its_transport_is_counted_and_goes_with_the_engines(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)
    before = time.time_ns()
    eventually(lambda: handles(nodes.p) == (1, 0, 2) and handles(nodes.d) == (0, 0, 2))
    eventually(lambda: nodes.p.status().movers[0].counted_unix_ns > before)
    d.close()
    eventually(lambda: handles(nodes.p) == (0, 0, 1) and handles(nodes.d) == (0, 0, 0))
    p.close()
    eventually(lambda: handles(nodes.p) == (0, 0, 0))


def test_what_waits_is_listed_on_either_side_with_its_age(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, range(4), 4 * BLOCK)
    p.hand_off(key, range(4))
    eventually(
        lambda: [t.half.phase for n in (nodes.p, nodes.d) for t in n.transfers(key.transfer_id)],
        lambda phases: phases == [admin_pb2.PHASE_MATCHED] * 2,
    )
    here = nodes.p.transfers(key.transfer_id)[0]
    assert here.sending
    assert here.half.engine_id == p.engine_id
    assert d.engine_id in here.half.other
    assert here.half.blocks == 4


def test_what_is_announced_is_counted_on_either_side_of_its_link_before_it_is_matched(nodes: Nodes) -> None:
    p, d = nodes.pair()
    transfer(p, d)

    def in_flight() -> list[int]:
        both = (nodes.p, nodes.d)
        return [sum(peer.transfers for peer in node.peers() if peer.up) for node in both]

    eventually(in_flight, lambda seen: seen == [0, 0])
    key = new_key()
    d.reserve(key, p, range(4), 4 * BLOCK)
    eventually(in_flight, lambda seen: seen == [1, 1])
    assert nodes.p.transfers(key.transfer_id) == []
    p.send(key, range(4), 4 * BLOCK)
    eventually(in_flight, lambda seen: seen == [0, 0])


def test_a_transfer_under_way_says_what_has_landed(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, p, range(4), 4 * BLOCK)
    p.hand_off(key, range(4))
    p.advance(key, 3 * BLOCK)
    size = 3 * BLOCK * p.read([0], 0, 1).nbytes
    eventually(
        lambda: [t.counts.bytes for t in nodes.p.transfers(key.transfer_id)], lambda seen: seen == [size]
    )


def test_what_carries_a_link_is_shown_and_one_below_the_floor_is_an_alarm(
    nodes: Nodes, tmp_path: Path
) -> None:
    d = nodes.engine(nodes.d, **LARGE)
    with Node("slow", tmp_path, link_floor=1 << 50) as slow, Engine(slow, "slow-p", **LARGE) as p:
        transfer(p, d, blocks=LARGE["blocks"])
        (peer,) = eventually(
            slow.peers, lambda found: found[0].bytes_per_second and "/" in found[0].transport
        )
        assert peer.below_floor
        assert peer.transport.startswith("nixl-ucx (tcp/")
        labels = {"peer": "d", "transport": peer.transport}
        assert slow.metric("kvpush_peer_transport_info", **labels) == 1
        assert slow.metric("kvpush_peer_below_floor", peer="d") == 1
        assert slow.metric("kvpush_peer_bytes_per_second", peer="d") > 0
        eventually(lambda: "link below its floor" in slow.log.read_text())
    assert not any(one.below_floor for one in nodes.d.peers())


def test_a_damaged_transfer_fails_and_its_receiver_hears_why(nodes: Nodes, tmp_path: Path) -> None:
    d, key = nodes.engine(nodes.d), new_key()
    faulty = {"faults__corrupt_writes": True, "verify": "all"}
    with Node("bad", tmp_path, {"KVPUSHD_ALLOW_FAULTS": "1"}, **faulty) as bad, Engine(bad, "bad-p") as p:
        d.reserve(key, p, range(4), 4 * BLOCK)
        p.send(key, range(4), 4 * BLOCK)
        for end in (d.wait_for(ReservationEnded, key), p.wait_for(HandoffEnded, key)):
            assert end.fault is not None
            assert end.fault.reason is Reason.CORRUPTED
        failed = {"outcome": "failed", "reason": "corrupted"}
        for node, engine in ((bad, "bad-p"), (nodes.d, d.engine_id)):  # D's once its blocks are fenced
            count = partial(node.metric, "kvpush_transfers_total", engine=engine, **failed)
            eventually(count, lambda counted: counted == 1)


def test_a_sample_fails_one_damaged_transfer_of_sixteen_and_counts_it(nodes: Nodes, tmp_path: Path) -> None:
    d = nodes.engine(nodes.d)
    faulty = {"faults__corrupt_writes": True, "verify": "sample"}
    with Node("bad", tmp_path, {"KVPUSHD_ALLOW_FAULTS": "1"}, **faulty) as bad, Engine(bad, "bad-p") as p:
        ends = []
        for _ in range(32):  # one after another: a failed one takes what else is under way with it
            key = new_key()
            d.reserve(key, p, [0], BLOCK)
            p.send(key, [0], BLOCK)
            end = d.wait_for(ReservationEnded, key)
            sent = p.wait_for(HandoffEnded, key)
            ends.append((end.fault and end.fault.reason, sent.fault and sent.fault.reason))
            if not end.released:
                d.wait_for(ReservationReleased, key)
        for half in (ends[:16], ends[16:]):
            assert sorted(half, key=str) == [(Reason.CORRUPTED,) * 2] + [(None, None)] * 15
        for outcome, reason, wanted in (("failed", "corrupted", 2), ("landed", "none", 30)):
            labels = {"engine": "bad-p", "outcome": outcome, "reason": reason}
            count = partial(bad.metric, "kvpush_transfers_total", **labels)
            eventually(count, lambda counted, wanted=wanted: counted == wanted)


def test_engines_that_come_and_go_leave_no_descriptor_behind(nodes: Nodes) -> None:
    pids = [nodes.p.pid, nodes.d.pid, nodes.p.mover_pid, nodes.d.mover_pid]

    def come_and_go() -> None:
        p, d = nodes.pair()
        transfer(p, d)
        p.close()
        d.close()
        eventually(lambda: nodes.p.status().movers[0].pools + nodes.d.status().movers[0].pools == 0)

    come_and_go()
    before = [descriptors(pid) for pid in pids]
    for _ in range(5):
        come_and_go()
    # A connection or two of gRPC's or UCX's may be closing yet; five engines' would be many more.
    eventually(
        lambda: [descriptors(pid) - b for pid, b in zip(pids, before, strict=True)], lambda n: max(n) < 5
    )
