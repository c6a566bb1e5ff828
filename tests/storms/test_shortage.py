# SPDX-License-Identifier: Apache-2.0
"""A host that is out of something: the daemon says so, and goes on or ends so that it is started again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvpush_client._proto import engine_pb2
from kvpush_client.errors import DaemonRefused, DaemonUnreachable
from kvpush_client.events import Reason, ReservationEnded
from kvpush_client.items import Identity, Role
from kvpush_client.session import Session
from testing.node import DEADLINE, Node
from testing.processes import spares_of
from testing.rank import BLOCK, FINGERPRINT, Engine, new_key
from tests.daemon.daemon_kit import descriptors, eventually, transfer
from tests.rpc.engine_kit import Client

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """64 KiB."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def refuse(node: Node, times: int) -> None:
    """Something worth a line in the log, many times."""
    for _ in range(times):
        client = Client(node.runtime_dir)
        client.welcome(Identity("short", "l", Role.SCHEDULER, fingerprint=FINGERPRINT))
        client.send(engine_pb2.SessionRequest(items=[engine_pb2.EngineItem()]))
        next(client.call)
        client.close()
        eventually(lambda: "short" not in {e.engine_id for e in node.engines()})


@root
def test_a_full_disk_under_the_log_stops_no_transfer(folder: Path) -> None:
    with small_disk(folder / "disk") as disk, ExitStack() as stack:
        node = Node("n", disk)
        stack.enter_context(node)
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(node, "r"))
        transfer(s, r)
        filler = disk / "filler"
        with filler.open("wb") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))
        written = node.log.stat().st_size
        refuse(node, 30)
        transfer(s, r, seed=2)
        assert node.log.stat().st_size - written < 4096
        filler.unlink()
        refuse(node, 1)
        eventually(lambda: node.log.stat().st_size > written)
        assert node.stop() == 0


@contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """A running process may have so much and no more."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


@pytest.mark.parametrize("most", [None, 8], ids=["no more", "less than it has"])
def test_a_daemon_out_of_descriptors_serves_who_is_there_and_takes_others_once_it_can(
    folder: Path, most: int | None
) -> None:
    with Node("n", folder, link_silence=2.0) as node, ExitStack() as stack:
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(node, "r"))
        transfer(s, r)
        late = Session(node.runtime_dir, Identity("late", "l", Role.SCHEDULER, fingerprint=FINGERPRINT))
        with limited(node.pid, resource.RLIMIT_NOFILE, descriptors(node.pid) if most is None else most):
            late.start()
            with pytest.raises((DaemonUnreachable, DaemonRefused, TimeoutError)):
                late.wait_ready(3.0)
            transfer(s, r, seed=2)
            assert node.running
            assert node.log.read_text().count("out of descriptors: who is connected") == 1
        late.wait_ready(DEADLINE)
        late.close()
        eventually(lambda: "late" not in {e.engine_id for e in node.engines()})
        transfer(s, r, seed=3)
        assert len(node.log.read_text()) < 100_000
        assert node.stop() == 0


def test_a_mover_that_dies_while_the_daemon_is_out_of_descriptors_is_replaced_and_its_engines_come_back(
    folder: Path,
) -> None:
    with Node("n", folder, link_silence=2.0) as node, ExitStack() as stack:
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(node, "r"))
        transfer(s, r)
        (spare,), mover = eventually(lambda: spares_of(node.pid)), node.mover_pid
        with limited(node.pid, resource.RLIMIT_NOFILE, 8):  # what is open stays so, and nothing new has room
            os.kill(mover, signal.SIGKILL)
            sessions = [session for e in (s, r) for session in (e.scheduler, e.ranks[0].session)]
            eventually(lambda: not any(session.ready for session in sessions))
            said = "did not arrive: the daemon or its mover has too many files open"
            eventually(lambda: said in node.log.read_text())
        eventually(lambda: s.ready() and r.ready())
        assert node.mover_pid == spare
        transfer(s, r, seed=2)
        os.kill(spare, signal.SIGKILL)
        eventually(lambda: node.mover_pid not in (0, spare) and node.status().ready)
        transfer(s, r, seed=3)


@pytest.mark.parametrize("left", [0, 4])
def test_a_mover_out_of_descriptors_refuses_what_needs_some_and_takes_it_once_it_can(
    folder: Path, left: int
) -> None:
    with ExitStack() as stack:
        p, d = stack.enter_context(Node("p", folder)), stack.enter_context(Node("d", folder))
        s, r = stack.enter_context(Engine(p, "s")), stack.enter_context(Engine(d, "r"))
        near = stack.enter_context(Engine(d, "near"))
        transfer(near, r)
        movers = {node: node.mover_pid for node in (d, p)}
        before = {pid: descriptors(pid) for pid in movers.values()}
        for pid in movers.values():  # the receiving one makes an inlet, the sending one the way to it
            with limited(pid, resource.RLIMIT_NOFILE, descriptors(pid) + left):
                key = new_key()
                r.reserve(key, s, range(4), 4 * BLOCK, lease=DEADLINE)
                fault = r.wait_for(ReservationEnded, key).fault
                assert fault is not None
                assert fault.reason is Reason.TRANSPORT_FAILED
                assert "files open" in fault.detail or "Too many open files" in fault.detail, fault
                transfer(near, r, seed=2)
        assert {node: node.mover_pid for node in movers} == movers, "nobody died of it"
        transfer(s, r, seed=3)
        r.close()
        s.close()
        more = 8  # a connection or two that UCX keeps, or is closing
        eventually(lambda: max(descriptors(pid) - was for pid, was in before.items()), lambda n: n <= more)
        assert not p.stumbles() + d.stumbles()


def test_a_mover_out_of_descriptors_maps_no_pool_and_maps_it_once_it_can(folder: Path) -> None:
    with Node("n", folder) as node, Engine(node, "s") as s, Engine(node, "r") as r:
        transfer(s, r)
        pid, before = node.mover_pid, descriptors(node.mover_pid)
        late = Engine(node, "late")
        with limited(pid, resource.RLIMIT_NOFILE, before):
            late.begin()
            with pytest.raises(DaemonRefused, match=r"[Tt]oo many (open )?files") as raised:
                late.wait_ready()
            assert raised.value.reason is Reason.BAD_MEMORY
            transfer(s, r, seed=2)
        eventually(late.ready)
        transfer(s, late, seed=3)
        late.close()
        assert node.mover_pid == pid
        eventually(lambda: descriptors(pid) - before, lambda more: more <= 0)


SHORT = """
import os, resource, sys, time
from pathlib import Path
from kvpush_client.errors import KvpushClientError
from kvpush_client.session import Identity, Role, Session

def session(name):
    return Session(Path(sys.argv[1]), Identity(name, "l", Role.SCHEDULER, fingerprint={"model": "test"}))

def files():
    return len(os.listdir("/proc/self/fd"))

def limit(most):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, ceiling))

soft, ceiling = resource.getrlimit(resource.RLIMIT_NOFILE)
first = session("first")
first.start()
first.wait_ready(30)
for left in range(6):
    before = files()
    short = session(f"short-{left}")
    limit(before - 1 + left)  # what files() itself opened is closed
    try:
        short.start()
        short.wait_ready(3)
        print("ready", flush=True)
    except (OSError, KvpushClientError) as error:
        print(error, flush=True)
        limit(soft)
        if left == 0:
            short.start()  # it had not begun
        short.wait_ready(30)
    limit(soft)
    assert first.ready
    short.close()
    deadline = time.monotonic() + 30
    while files() > before:  # gRPC's threads close theirs when they get to run
        assert time.monotonic() < deadline, (files(), before)
        time.sleep(0.01)
first.close()
"""


def test_a_client_out_of_descriptors_says_so_and_connects_once_it_can(folder: Path) -> None:
    with Node("n", folder) as node:
        command = [sys.executable, "-c", SHORT, str(node.runtime_dir)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=5 * DEADLINE)
        assert ended.returncode == 0, ended.stderr
        said = ended.stdout.splitlines()
        assert len(said) == 6
        assert "ready" in said, "with some it connects"
        refused = [line for line in said if line != "ready"]
        assert len(refused) >= 2
        assert all("too many open files" in line.lower() for line in refused), refused


@pytest.mark.parametrize("files", [12, 63])
def test_a_daemon_that_may_open_too_few_files_does_not_start_and_says_so(folder: Path, files: int) -> None:
    command = [sys.executable, "-m", "kvpushd", f"--runtime-dir={folder}/r", "--insecure-peers", "--node=n"]
    ended = subprocess.run(
        ["prlimit", f"--nofile={files}", *command], capture_output=True, text=True, timeout=DEADLINE
    )
    assert ended.returncode == 1
    assert f"may open {files} files" in ended.stderr
    assert "LimitNOFILE" in ended.stderr


def _settled(node: Node) -> bool:
    """It answers, or it has ended: it may be about to."""
    try:
        node.status()
    except grpc.RpcError:
        return not node.running
    return True


def test_a_daemon_out_of_memory_goes_on_or_ends_and_another_takes_its_engines(folder: Path) -> None:
    with ExitStack() as stack:
        node = stack.enter_context(Node("n", folder, link_silence=2.0))
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(node, "r"))
        transfer(s, r)
        with limited(node.pid, resource.RLIMIT_AS, _address_space(node.pid) + (16 << 20)):
            heard = [_large(node, f"large-{n}", stack) for n in range(40) if node.running]
        told = any(why.startswith("RESOURCE_EXHAUSTED") and "no memory" in why for why in heard)
        assert told or not node.running, heard
        assert not told or "no memory" in node.log.read_text()
        assert not any(why.startswith("INVALID_ARGUMENT") for why in heard), "it is not the caller's fault"
        eventually(lambda: _settled(node))
        if not node.running:
            assert node.wait() != 0  # what systemd's Restart=on-failure takes up
            node.start()
        eventually(lambda: s.ready() and r.ready())
        transfer(s, r, seed=2)


@contextmanager
def _client(node: Node) -> Iterator[Client]:
    client = Client(node.runtime_dir)
    yield client
    client.close()


def _large(node: Node, name: str, stack: ExitStack) -> str:
    """A session, and a message of 4 MiB on it; what comes of that, or nothing where it is taken."""
    client = stack.enter_context(_client(node))
    try:
        client.hello(Identity(name, "l", Role.SCHEDULER, fingerprint=FINGERPRINT))
        item = engine_pb2.EngineItem(cancel=engine_pb2.Cancel(detail="x" * (4 << 20)))
        client.send(engine_pb2.SessionRequest(items=[item]))
        next(client.call)
        next(client.call)
    except grpc.RpcError as error:
        return f"{error.code().name} {error.details()}"
    return ""


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
