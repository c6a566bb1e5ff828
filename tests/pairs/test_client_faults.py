# SPDX-License-Identifier: Apache-2.0
"""Faults in the engine's own process, between vLLM and the daemon: the engine lives, and what it says
is right."""

import pytest

from pairs.kit import WAIT, Pair, Side, eventually, settle
from testing.clockwork.clock import Clock
from testing.engines import START, launch, prompt
from testing.faults.board import Board
from testing.faults.rules import Act, Rule

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

LENGTH = 300
WALK = Clock(seconds_per_prompt_token=0.001)
"""So that a prompt's messages are spread over its steps."""


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    return Board(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def cast(harness, nodes, model, board):
    """P and D with the connector of the test build."""
    a, b = nodes

    def start(name, role, node):
        connector = "testing.faults.connector:FaultyConnector"
        return launch(harness, name, role, node, model, connector=connector, env=board.environment(name))

    with start("faulty-P", "kv_producer", a) as p, start("faulty-D", "kv_consumer", b) as d:
        for engine in (p, d):
            engine.ready(START)
        p.set_clock(WALK)
        yield Pair(Side(p, a), Side(d, b))


@pytest.fixture
def pair(cast, board):
    """After the test: a prompt moves again, every byte is right, and every block is back."""
    yield cast
    board.clear()
    eventually("a prompt moves again", lambda: all_came(cast.at_once(prompt(100, "again"))))
    settle(cast.p, cast.d)


def incarnations(side):
    return {found.incarnation for found in side.node.engines() if found.engine_id == side.engine.name}


def all_came(legs):
    return legs.right().external_cached_tokens == len(legs.tokens) - 1


@pytest.mark.parametrize(
    ("engine", "point", "act"),
    [
        ("faulty-P", "session.send.Handoff", Act.DROP),
        ("faulty-P", "session.send.Handoff", Act.REPEAT),
        ("faulty-P", "session.send.Advance", Act.DROP),
        ("faulty-P", "session.send.Advance", Act.REPEAT),
        ("faulty-P", "session.recv.HandoffEnded", Act.DROP),
        ("faulty-D", "session.send.Reserve", Act.DROP),
        ("faulty-D", "session.send.Reserve", Act.REPEAT),
        ("faulty-D", "session.recv.ReservationEnded", Act.DROP),
        ("faulty-D", "session.recv.ReservationEnded", Act.REPEAT),
    ],
)
def test_a_message_of_an_engines_that_is_lost_or_comes_twice_changes_no_answer(
    pair, board, engine, point, act
):
    side = pair.p if engine == "faulty-P" else pair.d
    before = incarnations(side)
    board.set([Rule(point, act, node=engine)])
    legs = pair.at_once(prompt(LENGTH, f"{point} {act}"))
    if act is Act.REPEAT:
        pair.moved(legs, LENGTH - 1)
    legs.right()
    legs.p.result(WAIT)
    (firing,) = eventually("the fault has struck", lambda: board.firings)
    assert firing.pid in side.engine.inspect("testing.clockwork.probes:process_ids")
    if act is Act.DROP:
        # Whichever of the engine's sessions it was said on: the loss ends them all, and they join again.
        eventually("the engine joins again", lambda: incarnations(side) - before)
    else:
        assert incarnations(side) == before
