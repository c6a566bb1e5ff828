# SPDX-License-Identifier: Apache-2.0
"""Daemons with limits that a test can reach, and leases that it can wait for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from testing.node import Node
from tests.daemon.daemon_kit import Nodes, eventually, leftovers

SETTINGS = {
    "link_silence": 20.0,
    "mover_silence": 10.0,
    "limits__halves_per_engine": 6000,
}


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """P's node and D's."""
    folder = tmp_path_factory.mktemp("storms")
    with Node("p", folder, **SETTINGS) as p, Node("d", folder, **SETTINGS) as d:
        yield p, d


@pytest.fixture
def nodes(started: tuple[Node, Node]) -> Iterator[Nodes]:
    """Both hold nothing after the test."""
    p, d = started
    with ExitStack() as stack:
        yield Nodes(p, d, p, stack)
    for node in (p, d):
        eventually(partial(leftovers, node), lambda left: not left)
        assert not node.stumbles()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvp") as path:
        yield Path(path)
