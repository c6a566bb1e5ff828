# SPDX-License-Identifier: Apache-2.0
"""Real daemons of the test build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from testing.faults.board import Board
from testing.node import Node
from tests.faults.story import SETTINGS, Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes, started once for all tests."""
    folder = tmp_path_factory.mktemp("faulty")
    board = Board(folder / "board")
    with ExitStack() as stack:
        nodes = [Node(name, folder, board=board, **SETTINGS) for name in ("p", "d")]
        for node in nodes:
            stack.callback(node.close)
            node.launch()
        yield Pair(nodes[0].wait_ready(), nodes[1].wait_ready(), board)
