# SPDX-License-Identifier: Apache-2.0
"""Nodes that prove who they are to each other."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from kvpush_client.events import Reason, ReservationEnded
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.conftest import SETTINGS
from tests.daemon.daemon_kit import eventually, papers, transfer

pytestmark = pytest.mark.nixl


@pytest.fixture
def three(tmp_path: Path) -> Iterator[tuple[Node, Node, Node]]:
    """P and D of one authority, and a stranger of another."""
    ours, theirs = trustme.CA(), trustme.CA()
    with ExitStack() as stack:
        made = [
            Node(name, tmp_path, **SETTINGS, **papers(tmp_path, authority, name))
            for name, authority in (("p.nodes", ours), ("d.nodes", ours), ("stranger.nodes", theirs))
        ]
        for node in made:
            stack.callback(node.close)
            node.launch()
        p, d, stranger = (node.wait_ready() for node in made)
        yield p, d, stranger


def test_nodes_of_one_authority_transfer_and_one_of_another_reaches_nobody(
    three: tuple[Node, Node, Node],
) -> None:
    p_node, d_node, strange_node = three
    with Engine(p_node, "p") as p, Engine(d_node, "d") as d, Engine(strange_node, "s") as stranger:
        transfer(p, d)
        key = new_key()
        p.send(key, range(4), 4 * BLOCK)
        stranger.reserve(key, p, range(4), 4 * BLOCK)
        end = stranger.wait_for(ReservationEnded, key)
        assert end.fault is not None
        assert end.fault.reason in (Reason.FORBIDDEN, Reason.PEER_UNREACHABLE)
        assert not stranger.read(range(4), 0, 4 * BLOCK).any()
        assert p_node.status().held.handoffs == 1
        assert p_node.status().peer_security == "mtls"


def test_a_node_with_a_certificate_that_has_expired_does_not_start_and_one_that_soon_does_warns(
    tmp_path: Path,
) -> None:
    ours, now = trustme.CA(), datetime.datetime.now(datetime.UTC)

    def node(days: float) -> Node:
        files = papers(tmp_path, ours, "n.nodes", not_after=now + datetime.timedelta(days=days))
        return Node("n.nodes", tmp_path, **SETTINGS, **files)

    with pytest.raises(RuntimeError, match="certificate has expired"):
        node(-1).start()
    with node(3) as warning:
        eventually(lambda: "n.nodes.cert.pem expires" in warning.log.read_text())
