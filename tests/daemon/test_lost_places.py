# SPDX-License-Identifier: Apache-2.0
"""A runtime directory that is removed below a live daemon, and the daemon that is started there then."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpush_client.events import HandoffEnded, ReservationEnded, ReservationReleased, Side, TransferKey
from testing.node import Node
from testing.rank import Engine, new_key
from tests.daemon.conftest import SETTINGS
from tests.daemon.daemon_kit import LARGE, Nodes, alive, eventually, stopped, transfer, under_way

pytestmark = pytest.mark.nixl

Start = Callable[[str], Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a node of the test's own; each has a log of its own, also where several share a name."""
    with ExitStack() as stack:
        count = 0

        def started(name: str) -> Node:
            nonlocal count
            count += 1
            node = Node(name, tmp_path, **SETTINGS)
            node.log = tmp_path / f"{name}.{count}.log"
            stack.callback(node.close)
            return node.start()

        yield started


def hold(node: Node, engine: Engine) -> TransferKey:
    """A handoff that keeps a drain from ending."""
    key = new_key()
    engine.hand_off(key, range(8))
    eventually(lambda: node.status().held.handoffs)
    return key


def test_a_daemon_whose_runtime_dir_is_removed_says_so_is_not_ready_and_ends_to_be_started_again(
    start: Start,
) -> None:
    node = start("own")
    with Engine(node, "p") as p:
        key = hold(node, p)
        mover = node.mover_pid
        shutil.rmtree(node.runtime_dir)
        status, text = node.http("/readyz")
        assert status == 503
        assert f"{node.runtime_dir}/lock was removed or replaced" in text
        eventually(lambda: "it drains" in node.http("/readyz")[1])
        p.scheduler.cancel(key, Side.SENDER)
        assert node.wait() == 1
        assert not alive(mover)
        assert node.log.read_text().count("runtime directory lost") == 1
        node.start()
        eventually(p.ready)


def test_the_end_of_a_daemon_without_its_directory_leaves_the_one_that_has_it_now_alone(start: Start) -> None:
    former = start("own")
    with Engine(former, "p") as p:
        key = hold(former, p)
        shutil.rmtree(former.runtime_dir)
        later = start("own")
        p.scheduler.cancel(key, Side.SENDER)
        assert former.wait() == 1
        assert sorted(path.suffix for path in later.runtime_dir.iterdir()) == ["", ".sock", ".sock", ".sock"]
        assert later.status().ready
        assert later.http("/readyz")[0] == 200
        with Engine(later, "new"):
            eventually(p.ready)
            assert later.status().held.engines == 2


def test_a_daemon_in_the_place_of_one_that_stands_still_releases_nothing_of_it(start: Start) -> None:
    with ExitStack() as stack:
        nodes = Nodes(start("p"), former := start("d"), former, stack)
        p, d = nodes.pair(**LARGE)
        mover = former.mover_pid
        with under_way(nodes, p, d) as flight, stopped(former.pid):
            shutil.rmtree(former.runtime_dir)
            later = start("d")
            assert not d.wait_for(ReservationEnded, flight.key).released
            eventually(d.ready)
            assert later.status().held.engines == 1
            assert alive(mover)
            assert not [event for event in d.heard if isinstance(event, ReservationReleased)]
        d.wait_for(ReservationReleased, flight.key)
        assert not alive(mover)
        assert former.wait() == 1
        assert p.wait_for(HandoffEnded, flight.key).fault is not None
        transfer(p, d)
        assert later.status().ready
