# SPDX-License-Identifier: Apache-2.0
"""Sockets are bound with their mode, over stale ones, and never over a live daemon's."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import grpc.aio
import pytest

from kvpushd.errors import ConfigError
from kvpushd.rpc import sockets
from testing.front import Daemon, DaemonProcess
from tests.rpc.engine_kit import serves


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_sockets_are_for_owner_and_group(daemon: Daemon, runtime_dir: Path) -> None:
    assert mode(runtime_dir / "kvpushd.sock") == 0o660
    assert mode(runtime_dir / "fd.sock") == 0o660


def test_a_dead_daemons_sockets_are_replaced(runtime_dir: Path) -> None:
    DaemonProcess(runtime_dir).kill()
    assert (runtime_dir / "kvpushd.sock").is_socket()
    assert (runtime_dir / "fd.sock").is_socket()
    daemon = Daemon(runtime_dir)
    assert serves(runtime_dir)
    daemon.stop()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_live_daemons_sockets_are_left_alone(stopped: bool, runtime_dir: Path) -> None:
    daemon = DaemonProcess(runtime_dir)
    if stopped:
        daemon.send(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="another kvpushd listens"):
        sockets.make_way(runtime_dir / "kvpushd.sock", socket.SOCK_STREAM)
    with pytest.raises(ConfigError, match="another kvpushd listens"):
        sockets.listen(runtime_dir / "fd.sock", socket.SOCK_SEQPACKET)
    if stopped:
        daemon.send(signal.SIGCONT)
    assert serves(runtime_dir)
    daemon.kill()


def test_a_daemon_that_ends_removes_its_sockets(daemon: Daemon, runtime_dir: Path) -> None:
    assert len(list(runtime_dir.iterdir())) == 2
    daemon.stop()
    assert list(runtime_dir.iterdir()) == []


def test_a_daemon_that_ends_removes_nothing_of_one_that_took_its_place(runtime_dir: Path) -> None:
    with ExitStack() as stack:
        former = Daemon(runtime_dir)
        stack.callback(former.stop)
        for path in runtime_dir.iterdir():
            path.unlink()
        stack.callback(Daemon(runtime_dir).stop)
        former.stop()
        assert len(list(runtime_dir.iterdir())) == 2
        assert serves(runtime_dir)


def test_a_file_that_is_no_socket_is_left_alone(runtime_dir: Path) -> None:
    path = runtime_dir / "fd.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        sockets.listen(path, socket.SOCK_SEQPACKET)
    assert path.read_text() == "mine"


def test_a_path_too_long_for_a_socket_is_named(runtime_dir: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107"):
        sockets.make_way(runtime_dir / ("x" * 107), socket.SOCK_STREAM)


def test_a_folder_that_is_missing_is_named(runtime_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/fd\.sock"):
        sockets.listen(runtime_dir / "missing" / "fd.sock", socket.SOCK_SEQPACKET)

    async def serve() -> None:
        sockets.add_port(grpc.aio.server(), runtime_dir / "missing" / "kvpushd.sock")

    with pytest.raises(ConfigError, match=r"missing/kvpushd\.sock"):
        asyncio.run(serve())
