# SPDX-License-Identifier: Apache-2.0
"""Sessions and daemons that are ended with their test."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpush_client.items import Identity, Role
from kvpush_client.pool import Pool
from kvpush_client.session import Session
from testing.front import LAYOUT, Daemon, DaemonProcess, Desk, Engine, scheduler


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvp") as path:
        yield Path(path)


@pytest.fixture
def daemons(runtime_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons at `runtime_dir`, one at a time."""
    with ExitStack() as stack:

        def make(desk: Desk | None = None, **how: Any) -> Daemon:
            daemon = Daemon(runtime_dir, desk, **how)
            stack.callback(daemon.stop)
            return daemon

        yield make


@pytest.fixture
def processes(runtime_dir: Path) -> Iterator[Callable[[], DaemonProcess]]:
    """Makes daemons in child processes at `runtime_dir`, one at a time."""
    with ExitStack() as stack:

        def make() -> DaemonProcess:
            daemon = DaemonProcess(runtime_dir)
            stack.callback(daemon.kill)
            return daemon

        yield make


@pytest.fixture
def engines(runtime_dir: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines with a started session; checks at the end that no thread and no descriptor is left."""
    before = _threads()
    with ExitStack() as stack:

        def make(identity: Identity | None = None, **settings: float) -> Engine:
            identity = identity or scheduler()
            if identity.role is Role.WORKER:
                pool = Pool.create(LAYOUT.pool_bytes, "pool")
                stack.callback(pool.close)
                session = Session(runtime_dir, identity, pool, LAYOUT, **settings)
            else:
                session = Session(runtime_dir, identity, **settings)
            stack.callback(session.close)
            session.start()
            return Engine(session)

        yield make
    # Those before are of engines that other tests share.
    assert _threads() == before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvpush-")}
