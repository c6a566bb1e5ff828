# SPDX-License-Identifier: Apache-2.0
"""Real daemons of the test build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from testing.faults.board import Board
from testing.node import Node
from tests.faults.story import SETTINGS, Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes, started once for all tests."""
    with _pair(tmp_path_factory.mktemp("faulty"), SETTINGS) as made:
        yield made


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes whose agents tell each other all they can: short runs are packed, and all is verified."""
    settings = {**SETTINGS, "ucx__tls": "tcp,self", "verify": "all"}
    with _pair(tmp_path_factory.mktemp("talking"), settings) as made:
        yield made


@contextmanager
def _pair(folder: Path, settings: dict[str, Any]) -> Iterator[Pair]:
    board = Board(folder / "board")
    with ExitStack() as stack:
        nodes = [Node(name, folder, board=board, **settings) for name in ("p", "d")]
        for node in nodes:
            stack.callback(node.close)
            node.launch()
        yield Pair(nodes[0].wait_ready(), nodes[1].wait_ready(), board)
