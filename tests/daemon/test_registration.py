# SPDX-License-Identifier: Apache-2.0
"""Who may be an engine, and with what memory; what is refused is said where it can be read."""

from __future__ import annotations

import fcntl
import os
import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import grpc
import pytest

from kvpush_client._proto.engine_pb2 import PROCESS_ROLE_SCHEDULER, Hello, SessionRequest
from kvpush_client._proto.engine_pb2_grpc import EngineServiceStub
from kvpush_client.errors import DaemonRefused
from kvpush_client.events import Fault, Reason, ReservationEnded
from kvpush_client.layout import Layout
from kvpush_client.pool import SEALS, Pool
from kvpush_client.session import Identity, Role, Session
from testing.faults.board import Board
from testing.node import DEADLINE
from testing.rank import BLOCK, FINGERPRINT, Engine, layout, new_key
from tests.daemon.daemon_kit import Nodes, eventually, transfer

pytestmark = pytest.mark.nixl


@dataclass
class Memory:
    """What is offered in place of a Pool."""

    fd: int
    nbytes: int


@contextmanager
def memfd(nbytes: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def refusal(nodes: Nodes, memory: Memory | Pool, cut: Layout) -> DaemonRefused:
    """What a worker is told that offers this."""
    identity = Identity("refused", "launch", Role.WORKER, fingerprint=FINGERPRINT)
    session = Session(nodes.p.runtime_dir, identity, cast(Pool, memory), cut)
    session.start()
    try:
        with pytest.raises(DaemonRefused) as refused:
            session.wait_ready(DEADLINE)
    finally:
        session.close()
    return refused.value


def fault(end: ReservationEnded) -> Fault:
    assert end.fault is not None, end
    return end.fault


CUT = layout(64)


def test_memory_that_its_owner_could_truncate_is_refused(nodes: Nodes) -> None:
    with memfd(CUT.pool_bytes, 0) as fd:
        told = refusal(nodes, Memory(fd, CUT.pool_bytes), CUT)
    assert told.reason is Reason.BAD_MEMORY
    assert "F_SEAL_SHRINK" in told.detail


def test_memory_that_is_shorter_than_offered_is_refused(nodes: Nodes) -> None:
    with memfd(CUT.pool_bytes - 4096, SEALS) as fd:
        told = refusal(nodes, Memory(fd, CUT.pool_bytes), CUT)
    assert told.reason is Reason.BAD_MEMORY
    assert f"{CUT.pool_bytes:,}" in told.detail


def test_memory_that_can_not_be_written_is_refused(nodes: Nodes) -> None:
    with memfd(CUT.pool_bytes, SEALS | fcntl.F_SEAL_WRITE) as fd:
        told = refusal(nodes, Memory(fd, CUT.pool_bytes), CUT)
    assert told.reason is Reason.BAD_MEMORY


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give memory away")
def test_memory_of_another_user_is_refused(nodes: Nodes) -> None:
    with memfd(CUT.pool_bytes, SEALS) as fd:
        os.fchown(fd, 65534, -1)
        told = refusal(nodes, Memory(fd, CUT.pool_bytes), CUT)
    assert told.reason is Reason.BAD_MEMORY
    assert "65534" in told.detail


def test_a_descriptor_that_is_no_memory_is_refused(nodes: Nodes) -> None:
    ours, theirs = os.pipe()
    try:
        told = refusal(nodes, Memory(theirs, CUT.pool_bytes), CUT)
    finally:
        os.close(ours)
        os.close(theirs)
    assert told.reason is Reason.BAD_MEMORY
    assert "pipe" in told.detail


def test_a_layout_of_another_size_than_the_pool_names_both(nodes: Nodes) -> None:
    pool = Pool.create(CUT.pool_bytes + 4096, "test")
    told = refusal(nodes, pool, CUT)
    assert told.reason is Reason.BAD_MEMORY
    assert f"{CUT.pool_bytes:,}" in told.detail
    assert f"{CUT.pool_bytes + 4096:,}" in told.detail


def test_a_layout_with_cells_outside_the_pool_is_refused(nodes: Nodes) -> None:
    plane = replace(CUT.layers[3].planes[0], offset=CUT.pool_bytes - 8)
    bad = replace(CUT, layers=(*CUT.layers[:3], replace(CUT.layers[3], planes=(plane,))))
    told = refusal(nodes, Pool.create(CUT.pool_bytes, "test"), bad)
    assert told.reason is Reason.INVALID
    assert "layers.3" in told.detail


def test_an_engine_that_was_refused_holds_nothing_and_a_right_one_may_take_its_name(nodes: Nodes) -> None:
    bad = replace(CUT, blocks=0)
    refusal(nodes, Pool.create(CUT.pool_bytes, "test"), bad)
    eventually(lambda: nodes.p.status().held.engines == 0)
    with Engine(nodes.p, "refused") as p:
        transfer(p, nodes.engine(nodes.d))


def test_two_engines_of_one_name_are_told_apart_and_the_first_goes_on(nodes: Nodes) -> None:
    p, d = nodes.engine(nodes.p, launch="first-launch"), nodes.engine(nodes.d)
    second = Engine(nodes.p, p.engine_id, launch="second-launch")
    second.begin()
    try:
        with pytest.raises(DaemonRefused) as refused:
            second.wait_ready()
    finally:
        second.close()
    assert refused.value.reason is Reason.DUPLICATE
    assert repr(p.engine_id) in refused.value.detail
    for said in (refused.value.detail, nodes.p.log.read_text()):
        assert "first-launch" not in said, "who knows it can join the engine"
        assert "second-launch" not in said
    transfer(p, d)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_scheduler_of_one_launch_is_refused(nodes: Nodes, rank: int) -> None:
    nodes.engine(nodes.p, launch="same", ranks=2)
    name = next(iter(nodes.p.engines())).engine_id
    identity = Identity(name, "same", Role.SCHEDULER, rank, 2, 2, fingerprint=FINGERPRINT)
    twin = Session(nodes.p.runtime_dir, identity)
    twin.start()
    try:
        with pytest.raises(DaemonRefused) as refused:
            twin.wait_ready(DEADLINE)
    finally:
        twin.close()
    assert refused.value.reason is Reason.DUPLICATE


def test_a_process_that_comes_again_takes_its_former_place(nodes: Nodes) -> None:
    """Its former stream is lost, and the daemon does not know it yet: a ping was not answered in time."""
    hello = Hello(
        protocol=1, engine_id="again", launch="one", role=PROCESS_ROLE_SCHEDULER, world_size=1, local_ranks=1
    )
    hello.process = b"p" * 16
    with ExitStack() as stack:
        calls = []
        for _ in range(2):
            channel = stack.enter_context(
                grpc.insecure_channel(f"unix:{nodes.p.runtime_dir / 'kvpushd.sock'}")
            )
            said: queue.SimpleQueue[SessionRequest | None] = queue.SimpleQueue()
            said.put(SessionRequest(hello=hello))
            stack.callback(said.put, None)
            calls.append(EngineServiceStub(channel).Session(iter(said.get, None), timeout=DEADLINE))
            assert next(calls[-1]).HasField("welcome")
        with pytest.raises(grpc.RpcError, match="the same process came again"):
            next(calls[0])


def test_engines_of_different_models_are_refused_naming_the_field_and_both_values(nodes: Nodes) -> None:
    p = nodes.engine(nodes.p, fingerprint={"model": "one", "protocol": "1"})
    d = nodes.engine(nodes.d, fingerprint={"model": "another", "protocol": "1"})
    key = new_key()
    d.reserve(key, p, range(4), 4 * BLOCK)
    told = fault(d.wait_for(ReservationEnded, key))
    assert told.reason is Reason.FINGERPRINT_MISMATCH
    for word in ("model", "'one'", "'another'"):
        assert word in told.detail
    assert nodes.p.status().movers[0].pools == 1


def test_pools_that_can_not_be_mapped_are_refused_naming_the_field_and_both_values(nodes: Nodes) -> None:
    p, d = nodes.engine(nodes.p, cell=64), nodes.engine(nodes.d, cell=128)
    key = new_key()
    d.reserve(key, p, range(4), 4 * BLOCK)
    told = fault(d.wait_for(ReservationEnded, key))
    assert told.reason is Reason.LAYOUT_MISMATCH
    for word in ("cell_bytes", "64", "128"):
        assert word in told.detail


def test_one_that_does_not_fit_leaves_the_way_open_for_one_that_does(nodes: Nodes) -> None:
    stranger = nodes.engine(nodes.p, fingerprint={"model": "another", "protocol": "1"})
    p, d = nodes.pair()
    key = new_key()
    d.reserve(key, stranger, range(4), 4 * BLOCK)
    assert fault(d.wait_for(ReservationEnded, key)).reason is Reason.FINGERPRINT_MISMATCH
    transfer(p, d)
    d.reserve(again := new_key(), stranger, range(4), 4 * BLOCK)
    assert fault(d.wait_for(ReservationEnded, again)).reason is Reason.FINGERPRINT_MISMATCH
    transfer(p, d, seed=2)


def test_what_a_worker_says_before_it_hears_that_its_pool_is_ready_is_not_lost(
    nodes: Nodes, tmp_path: Path
) -> None:
    board, d = Board(tmp_path), nodes.engine(nodes.d)
    late = {"point": "session.recv.PoolReady", "act": "delay", "when": "before", "seconds": 1.0}
    board.set([late])
    p = Engine(nodes.p, "ready-late", board=board)
    nodes.stack.callback(p.close)
    p.begin()
    # Its scheduler may hand off from now on.
    eventually(lambda: [e for e in nodes.p.engines() if e.engine_id == p.engine_id and e.ranks_ready])
    p.scheduler.wait_ready(DEADLINE)
    assert not p.ranks[0].session.ready
    transfer(p, d)
