# SPDX-License-Identifier: Apache-2.0
"""The points that there are, and the board on which a test says what goes wrong at them."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import get_args

import pytest

from kvpush_client._proto import engine_pb2, mover_pb2, peer_pb2
from kvpushd.mover.transport.base import Carrier, Transport
from kvpushd.mover.transport.notices import Notice
from testing.faults import catalog
from testing.faults.board import Board
from testing.faults.points import Broken, Lane, Points
from testing.faults.rules import Act, Rule

POINT = "peer.send.Announce"


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def points(board: Board, process: str = catalog.DAEMON, node: str = "d") -> Points:
    return Points(board.folder, process, node)


def test_every_call_of_the_transport_contract_is_a_point() -> None:
    # What only looks, or ends the process's use of all, can't go wrong by itself.
    calls = {name for kind in (Carrier, Transport) for name in vars(kind) if not name.startswith("_")}
    looks = {"name", "in_flight", "handles", "close", "bell"}
    assert {f"nixl.{call}" for call in calls - looks} <= {point.name for point in catalog.points()}


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("peer", peer_pb2.ReceiverItem),
        ("peer", peer_pb2.SenderItem),
        ("session", engine_pb2.EngineItem),
        ("session", engine_pb2.EngineEvent),
        ("mover", mover_pb2.MoverCommand),
        ("mover", mover_pb2.MoverReport),
    ],
)
def test_every_message_is_a_point_where_it_is_sent(link: str, message: type) -> None:
    kinds = {field.message_type.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    assert {f"{link}.send.{kind}" for kind in kinds} <= {point.name for point in catalog.points()}


def test_every_notice_of_an_agent_is_a_point_on_either_side() -> None:
    sides = {f"notice.{side}.{kind.__name__}" for side in ("send", "recv") for kind in get_args(Notice)}
    assert sides <= {point.name for point in catalog.points()}


def test_a_rule_strikes_as_often_as_it_says_from_its_nth_time_on(board: Board) -> None:
    board.set([Rule(POINT, Act.DROP, nth=2, times=2)])
    here = points(board)
    assert [here.strikes(POINT, "before") is not None for _ in range(5)] == [False, True, True, False, False]
    assert [firing.point for firing in board.firings] == [POINT, POINT]


def test_a_process_that_comes_after_one_that_was_struck_is_spared(board: Board) -> None:
    board.set([Rule(POINT, Act.EXIT)])
    assert points(board).strikes(POINT, "before") is not None
    assert points(board).strikes(POINT, "before") is None


def test_a_rule_strikes_only_where_it_is_meant_to(board: Board) -> None:
    board.set([{"point": "peer.*", "act": "fail", "when": "after", "process": "daemon", "node": "d"}])
    assert points(board, node="p").strikes(POINT, "after") is None
    assert points(board, catalog.MOVER).strikes(POINT, "after") is None
    assert points(board).strikes(POINT, "before") is None
    assert points(board).strikes("session.send.Matched", "after") is None
    assert points(board).strikes(POINT, "after") is not None


def test_without_rules_nothing_strikes(board: Board) -> None:
    here = points(board)
    board.set([Rule(POINT, Act.DROP)])
    board.clear()
    assert here.strikes(POINT, "before") is None


@pytest.mark.parametrize(
    "rule",
    [
        Rule("peer.send.Nothing", Act.DROP),
        Rule(POINT, Act.DROP, when="after"),
        Rule(POINT, Act.DROP, process="mover"),
        Rule("nixl.register", Act.REORDER),
        Rule(POINT, Act.REPEAT, when="after"),
        Rule("nixl.register", Act.REPEAT, when="after"),
        Rule("nixl.register", Act.DROP, when="after"),
        Rule("nixl.post", Act.DROP, when="after"),
        Rule("nixl.post", Act.FAIL, when="after"),
        Rule("fds.send.PoolAnswer", Act.FAIL, when="after"),
        Rule("admin.recv.GetStatus", Act.DELAY, when="after"),
        Rule("notice.recv.Bell", Act.FAIL),
        Rule("notice.send.Bell", Act.REORDER),
        Rule("nixl.inspect", Act.REORDER),
    ],
)
def test_a_rule_that_can_happen_nowhere_is_refused(board: Board, rule: Rule) -> None:
    with pytest.raises(ValueError, match="can happen nowhere"):
        board.set([rule])


def test_a_hang_lasts_until_its_rule_is_taken_away(board: Board) -> None:
    board.set([Rule(POINT, Act.HANG)])
    here = points(board)
    rule = here.strikes(POINT, "before")
    assert rule is not None
    hung = threading.Thread(target=here.suffer, args=(rule,))
    hung.start()
    asyncio.run(board.fired(1))
    assert hung.is_alive()
    board.clear()
    hung.join(30)
    assert not hung.is_alive()


def test_what_fails_is_told_by_an_exception(board: Board) -> None:
    with pytest.raises(Broken, match=POINT):
        points(board).suffer(Rule(POINT, Act.FAIL))


def test_who_waits_for_a_fault_that_does_not_come_is_told(board: Board) -> None:
    board.set([Rule(POINT, Act.DROP)])
    with pytest.raises(AssertionError, match="0 of 1 faults"):
        asyncio.run(board.fired(1, deadline=0.01))


@pytest.mark.parametrize(
    ("act", "passed"),
    [
        (None, "abc"),
        (Act.DELAY, "abc"),
        (Act.DROP, "bc"),
        (Act.REPEAT, "aabc"),
        (Act.REORDER, "bac"),
    ],
)
def test_what_passes_is_lost_doubled_or_swapped(act: Act | None, passed: str) -> None:
    lane: Lane[str] = Lane()
    rules = [None if act is None else Rule(POINT, act), None, None]
    out = [one for what, rule in zip("abc", rules, strict=True) for one in lane.passes(what, rule, str)]
    assert "".join(out) == passed


def test_a_process_finds_its_board_by_its_environment(board: Board) -> None:
    board.set([Rule(POINT, Act.DROP, node="here")])
    environment = {**os.environ, **board.environment("here")}
    assert Points.of_environment(catalog.DAEMON, environment).strikes(POINT, "before") is not None
