# SPDX-License-Identifier: Apache-2.0
"""A daemon's life: start, drain, stop, and what is left of it."""

from __future__ import annotations

import grp
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpush_client.events import Draining, HandoffEnded, Matched, Reason, ReservationEnded
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.conftest import SETTINGS
from tests.daemon.daemon_kit import (
    LARGE,
    Nodes,
    alive,
    assert_same,
    eventually,
    landed,
    spare_of,
    transfer,
    under_way,
)

pytestmark = pytest.mark.nixl


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """One of the test's own."""
    with Node("own", tmp_path, **SETTINGS) as own:
        yield own


def test_a_drain_lets_running_work_end_and_refuses_new_work_with_the_reason(nodes: Nodes) -> None:
    p, d = nodes.pair()
    key, late = new_key(), new_key()
    mover = nodes.p.mover_pid
    p.fill(range(8), 51)
    d.reserve(key, p, range(8), 8 * BLOCK)
    p.hand_off(key, range(8))
    d.wait_for(Matched, key)
    nodes.p.signal(signal.SIGTERM)
    p.wait_for(Draining)
    status, text = nodes.p.http("/readyz")
    assert (status, text) == (503, "it drains\n")
    p.hand_off(late, range(8))
    refused = p.wait_for(HandoffEnded, late)
    assert refused.fault is not None
    assert refused.fault.reason is Reason.DRAINING
    d.reserve(late, p, range(20, 28), 8 * BLOCK)
    refused_too = d.wait_for(ReservationEnded, late)
    assert refused_too.fault is not None
    assert refused_too.fault.reason is Reason.DRAINING
    p.send(key, [], 8 * BLOCK)
    landed(p, d, key)
    assert_same(p, range(8), d, range(8), 8 * BLOCK)
    assert nodes.p.wait() == 0
    assert not alive(mover)
    nodes.p.start()
    eventually(p.ready)
    transfer(p, d)


def test_an_idle_daemon_ends_at_once_and_leaves_no_socket_to_mistake(node: Node) -> None:
    mover, spare = node.mover_pid, spare_of(node)
    assert node.stop() == 0
    assert not alive(mover)
    assert not alive(spare)
    assert node.start().status().ready


def test_a_second_signal_stops_a_drain(nodes: Nodes) -> None:
    p, d = nodes.pair(**LARGE)
    with under_way(nodes, p, d) as flight:
        nodes.p.signal(signal.SIGTERM)
        p.wait_for(Draining)
        nodes.p.signal(signal.SIGTERM)
        assert nodes.p.wait() == 0
        end = d.wait_for(ReservationEnded, flight.key)
        assert end.fault is not None
    p.wait_for(HandoffEnded, flight.key)
    nodes.p.start()
    eventually(p.ready)
    transfer(p, d)


def test_a_drain_that_takes_too_long_is_ended_by_the_daemon(tmp_path: Path) -> None:
    with Node("own", tmp_path, **SETTINGS | {"drain_timeout": 0.2}) as node, Engine(node, "p") as p:
        key = new_key()
        p.hand_off(key, range(8))
        eventually(lambda: node.status().held.handoffs)
        assert node.stop() == 0
        assert p.wait_for(HandoffEnded, key).fault is not None


def test_a_second_daemon_in_the_same_place_says_so_and_leaves_the_first_alone(node: Node) -> None:
    second = Node(node.name, node.runtime_dir.parent, **SETTINGS)
    second.log = node.log.with_suffix(".second")
    with ExitStack() as stack:
        stack.callback(second.close)
        assert second.launch().wait() == 1
    assert "another kvpushd runs in" in second.log.read_text()
    assert node.status().ready


def test_a_daemon_that_was_killed_is_followed_by_another_in_the_same_place(node: Node) -> None:
    with Engine(node, "p") as p:
        pid = node.pid
        node.kill()
        assert (node.runtime_dir / "kvpushd.sock").is_socket()
        node.start()
        assert node.pid != pid
        eventually(p.ready)
        assert node.status().held.engines == 1


def test_a_port_that_is_taken_is_an_error_with_the_address(node: Node, tmp_path: Path) -> None:
    second = Node("second", tmp_path, peer_port=node.port, **SETTINGS)
    with ExitStack() as stack:
        stack.callback(second.close)
        assert second.launch().wait() == 1
    assert f"127.0.0.1:{node.port}" in second.log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
def test_the_socket_group_may_enter_before_there_are_sockets(node: Node, tmp_path: Path) -> None:
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, os.getegid()))
    # It gets no further than to its ports, of which one is taken.
    second = Node("second", tmp_path, peer_port=node.port, socket_group=group.gr_name, **SETTINGS)
    with ExitStack() as stack:
        stack.callback(second.close)
        assert second.launch().wait() == 1
    assert second.runtime_dir.stat().st_gid == group.gr_gid
    assert not list(second.runtime_dir.glob("*.sock"))


def test_a_runtime_dir_that_can_not_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    node = Node("own", tmp_path, **SETTINGS | {"runtime_dir": tmp_path / "file" / "below"})
    with ExitStack() as stack:
        stack.callback(node.close)
        assert node.launch().wait() == 1
    assert f"runtime_dir {tmp_path}/file/below" in node.log.read_text()
