# SPDX-License-Identifier: Apache-2.0
"""Real daemons. What a test leaves behind on them fails it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from testing.node import Node
from tests.daemon.daemon_kit import Nodes, eventually, leftovers

# Short enough to see what comes of them; the defaults are the operator's.
SETTINGS = {"mover_silence": 4.0, "link_silence": 2.5, "fence_patience": 0.5, "drain_timeout": 10.0}


@pytest.fixture(scope="session")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node, Node]]:
    """Started once for all tests; who ends one starts it again."""
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        p, d, e = (Node(name, folder, **SETTINGS) for name in ("p", "d", "e"))
        for node in (p, d, e):
            stack.callback(node.close)
            node.launch()
        yield p.wait_ready(), d.wait_ready(), e.wait_ready()


@pytest.fixture
def nodes(three_nodes: tuple[Node, Node, Node]) -> Iterator[Nodes]:
    """Three nodes that hold nothing, neither before the test nor, within the deadline, after it."""
    for node in three_nodes:
        if not node.running:  # a test failed between a kill and a start
            node.close()
            node.start()
    with ExitStack() as stack:
        yield Nodes(*three_nodes, stack)
    for node in three_nodes:
        eventually(partial(leftovers, node), lambda left: not left)
        assert not node.stumbles()
