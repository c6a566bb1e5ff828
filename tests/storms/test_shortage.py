# SPDX-License-Identifier: Apache-2.0
"""A host that is out of something: the daemon says so, and goes on or ends so that it is started again."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvpush_client._proto import engine_pb2
from kvpush_client.errors import DaemonRefused, DaemonUnreachable
from kvpush_client.items import Identity, Role
from kvpush_client.session import Session
from testing.node import DEADLINE, Node
from testing.rank import FINGERPRINT, Engine
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


def test_a_daemon_out_of_descriptors_serves_who_is_there_and_takes_others_once_it_can(folder: Path) -> None:
    with Node("n", folder, link_silence=2.0) as node, ExitStack() as stack:
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(node, "r"))
        transfer(s, r)
        late = Session(node.runtime_dir, Identity("late", "l", Role.SCHEDULER, fingerprint=FINGERPRINT))
        with limited(node.pid, resource.RLIMIT_NOFILE, descriptors(node.pid)):
            late.start()
            with pytest.raises((DaemonUnreachable, DaemonRefused, TimeoutError)):
                late.wait_ready(3.0)
            transfer(s, r, seed=2)
            assert node.running
        late.wait_ready(DEADLINE)
        late.close()
        eventually(lambda: "late" not in {e.engine_id for e in node.engines()})
        transfer(s, r, seed=3)
        assert len(node.log.read_text()) < 100_000
        assert node.stop() == 0


@pytest.mark.parametrize("files", [12, 63])
def test_a_daemon_that_may_open_too_few_files_does_not_start_and_says_so(folder: Path, files: int) -> None:
    command = [sys.executable, "-m", "kvpushd", f"--runtime-dir={folder}/r", "--insecure-peers", "--node=n"]
    ended = subprocess.run(
        ["prlimit", f"--nofile={files}", *command], capture_output=True, text=True, timeout=DEADLINE
    )
    assert ended.returncode == 1
    assert f"may open {files} files" in ended.stderr
    assert "LimitNOFILE" in ended.stderr


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
