# SPDX-License-Identifier: Apache-2.0
"""The front of a daemon, and clients of it, ended with their test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testing.front import Daemon
from tests.rpc.engine_kit import Client


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvp") as path:
        yield Path(path)


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Daemon]:
    """Cuts off clients that leave 1,000 events unread."""
    running = Daemon(runtime_dir, most_events=1000)
    yield running
    running.stop()


@pytest.fixture
def clients(runtime_dir: Path) -> Iterator[Callable[[], Client]]:
    """Makes clients."""
    with ExitStack() as stack:

        def make() -> Client:
            client = Client(runtime_dir)
            stack.callback(client.close)
            return client

        yield make
