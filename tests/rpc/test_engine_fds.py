# SPDX-License-Identifier: Apache-2.0
"""fd.sock: descriptors change hands once, and stray ones are closed."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from kvpush_client import wire
from kvpush_client._proto import engine_pb2
from kvpush_client.events import Fault, Reason
from kvpush_client.items import Identity
from kvpush_client.pool import Pool
from kvpushd.errors import BadMemory, KvpushError
from testing.front import Daemon, scheduler, until, worker
from tests.rpc.engine_kit import Client, open_files, send_datagram, serves

Clients = Callable[[], Client]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool.create(8192, "test")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_leaks(daemon: Daemon, runtime_dir: Path) -> Iterator[None]:
    """After each test, all descriptors that it caused are closed again."""
    serves(runtime_dir)
    before = open_files()
    yield
    until(lambda: open_files() <= before, what=lambda: f"{open_files()} descriptors, not {before}")


class Process:
    """A welcomed process of an engine, and its way to fd.sock."""

    def __init__(self, client: Client, identity: Identity, runtime_dir: Path) -> None:
        self.token = client.welcome(identity).token
        self._path = runtime_dir / "fd.sock"

    def offer(self, nbytes: int, *fds: int) -> bytes | Fault:
        """The pool's id, or why not. A lifeline comes with the former and not with the latter."""
        offer = engine_pb2.PoolOffer(token=self.token, pool_bytes=nbytes)
        answer, got = send_datagram(self._path, offer.SerializeToString(), list(fds))
        for fd in got:
            assert_is_live_pipe(fd)
            os.close(fd)
        said = engine_pb2.PoolAnswer.FromString(answer)
        assert len(got) == (0 if said.HasField("fault") else 1)
        return wire.fault_from_wire(said.fault) if said.HasField("fault") else said.pool_id


def assert_is_live_pipe(fd: int) -> None:
    poll = select.poll()
    poll.register(fd)
    assert poll.poll(0) == []


@pytest.fixture
def rank(daemon: Daemon, runtime_dir: Path) -> Iterator[Process]:
    client = Client(runtime_dir)
    yield Process(client, worker(), runtime_dir)
    client.close()


@pytest.fixture
def planner(daemon: Daemon, runtime_dir: Path) -> Iterator[Process]:
    client = Client(runtime_dir)
    yield Process(client, scheduler(), runtime_dir)
    client.close()


def reason(answer: bytes | Fault) -> Reason:
    assert isinstance(answer, Fault)
    return answer.reason


def test_a_worker_gets_an_id_and_the_lifeline_for_its_pool(rank: Process, pool: Pool, daemon: Daemon) -> None:
    assert rank.offer(pool.nbytes, pool.fd) == b"pool"
    assert daemon.desk.pools.get() == (8192, 8192, os.getuid())


def test_a_scheduler_gets_the_lifeline_alone(planner: Process) -> None:
    assert planner.offer(0) == b""


def test_a_scheduler_has_no_pool_to_offer(planner: Process, pool: Pool) -> None:
    assert reason(planner.offer(0, pool.fd)) is Reason.INVALID
    assert reason(planner.offer(pool.nbytes)) is Reason.INVALID


@pytest.mark.parametrize("count", [0, 2, 8])
def test_a_worker_offers_exactly_one_descriptor(count: int, rank: Process, pool: Pool) -> None:
    assert reason(rank.offer(pool.nbytes, *[pool.fd] * count)) is Reason.BAD_MEMORY


def test_more_descriptors_than_there_is_room_for_are_refused(rank: Process, pool: Pool) -> None:
    assert reason(rank.offer(pool.nbytes, *[pool.fd] * 40)) is Reason.INVALID


def test_a_pool_of_no_bytes_is_refused(rank: Process, pool: Pool) -> None:
    assert reason(rank.offer(0, pool.fd)) is Reason.BAD_MEMORY


def test_what_the_desk_refuses_is_closed_and_said(rank: Process, pool: Pool, daemon: Daemon) -> None:
    daemon.desk.pool_refusal = BadMemory("the memfd is not sealed")
    assert rank.offer(pool.nbytes, pool.fd) == Fault(Reason.BAD_MEMORY, "the memfd is not sealed")


def test_what_goes_wrong_with_one_offer_ends_no_others(rank: Process, pool: Pool, daemon: Daemon) -> None:
    daemon.desk.pool_refusal = cast("KvpushError", MemoryError("short"))
    with pytest.raises(AssertionError):  # the connection is closed, without an answer
        rank.offer(pool.nbytes, pool.fd)
    daemon.desk.pool_refusal = None
    assert reason(rank.offer(pool.nbytes, pool.fd)) is Reason.INVALID  # a second one: it is answered


def test_a_session_makes_one_offer(rank: Process, pool: Pool) -> None:
    rank.offer(pool.nbytes, pool.fd)
    assert reason(rank.offer(pool.nbytes, pool.fd)) is Reason.INVALID


@pytest.mark.parametrize("token", [b"", b"x" * 32])
def test_nobody_offers_with_anothers_token(token: bytes, rank: Process, pool: Pool) -> None:
    rank.token = token
    assert reason(rank.offer(pool.nbytes, pool.fd)) is Reason.FORBIDDEN


def test_a_token_dies_with_its_session(daemon: Daemon, clients: Clients, runtime_dir: Path) -> None:
    client = clients()
    gone = Process(client, scheduler("gone"), runtime_dir)
    daemon.desk.gone.get()  # the probe's
    client.close()
    daemon.desk.gone.get()
    assert reason(gone.offer(0)) is Reason.FORBIDDEN


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\x7f", os.urandom(4096), bytes(60_000)])
def test_bytes_that_are_no_offer_are_refused_and_the_socket_goes_on(
    data: bytes, runtime_dir: Path, pool: Pool
) -> None:
    answer, got = send_datagram(runtime_dir / "fd.sock", data, [pool.fd])
    assert got == []
    fault = wire.fault_from_wire(engine_pb2.PoolAnswer.FromString(answer).fault)
    assert fault.reason in (Reason.INVALID, Reason.FORBIDDEN)
    assert serves(runtime_dir)


def test_connections_that_say_nothing_hold_up_nobody(runtime_dir: Path) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    for sock in silent:
        sock.connect(str(runtime_dir / "fd.sock"))
    silent[0].close()
    assert serves(runtime_dir)
    for sock in silent:
        sock.close()


def test_beyond_sixty_four_connections_the_oldest_goes_for_one_more(runtime_dir: Path) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(67)
        ]
        for sock in silent:
            sock.settimeout(3.0)  # each may say nothing for five
            sock.connect(str(runtime_dir / "fd.sock"))
        assert [sock.recv(1) for sock in silent[:3]] == [b""] * 3
        silent[3].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[3].recv(1)


def test_whoever_only_holds_on_to_connections_keeps_no_engine_out(runtime_dir: Path) -> None:
    path = str(runtime_dir / "fd.sock")
    over = threading.Event()

    def hold(held: list[socket.socket]) -> None:
        """As many as there is room for, and another for each that is closed."""
        while not over.is_set():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(path)
                held.append(sock)
            except BlockingIOError:
                sock.close()
                over.wait(0.002)
            for one in [one for one in held if _is_closed(one)]:
                held.remove(one)
                one.close()

    held: list[socket.socket] = []
    holder = threading.Thread(target=hold, args=(held,))
    holder.start()
    try:
        until(lambda: len(held) >= 60)
        before = time.monotonic()
        assert all(serves(runtime_dir) for _ in range(3))
        took = time.monotonic() - before
    finally:
        over.set()
        holder.join()
        for sock in held:
            sock.close()
    assert took < 5.0, "that is what each connection is given to speak"


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
