# SPDX-License-Identifier: Apache-2.0
"""Daemons, movers and engines that die: who lives goes on, and what is right stays right.

The tests share one P and one D, and everything that one of them kills is up again when it ends.
"""

import os
import signal

import pytest

from kvpush_client._proto import admin_pb2, types_pb2
from pairs.kit import WAIT, Pair, Side, eventually, phase, settle
from testing.clockwork.clock import Clock
from testing.clockwork.harness import EngineFailed
from testing.engines import answer, launch, prompt
from testing.node import Node

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

SLOW = Clock(seconds_per_prompt_token=0.004)
START = 240


@pytest.fixture(scope="module")
def mortals(tmp_path_factory):
    """Two daemons that tests kill."""
    folder = tmp_path_factory.mktemp("mortals")
    with Node("ma", folder, lease=5, link_silence=5) as a, Node("mb", folder, lease=5, link_silence=5) as b:
        yield a, b


@pytest.fixture(scope="module")
def cast(harness, mortals, model):
    """P, D, and an F that decodes too but fails a request whose KV does not come."""
    a, b = mortals
    with (
        launch(harness, "mortal-P", "kv_producer", a, model) as p,
        launch(harness, "mortal-D", "kv_consumer", b, model) as d,
        launch(harness, "mortal-F", "kv_consumer", b, model, policy="fail") as f,
    ):
        for engine in (p, d, f):
            engine.ready(START)
        yield {"P": Side(p, a), "D": Side(d, b), "F": Side(f, b)}


@pytest.fixture
def trio(cast):
    """After the test: a prompt moves again between all of them, and everything is back."""
    yield Pair(cast["P"], cast["D"]), Pair(cast["P"], cast["F"])
    cast["P"].engine.set_clock(Clock())
    for receiver in (cast["D"], cast["F"]):
        moves_again(Pair(cast["P"], receiver))
    settle(*cast.values())


def moves_again(pair):
    """Engines register by themselves; until they have, prompts are computed where they are."""

    def moved():
        legs = pair.at_once(prompt(100, "again"))
        output = legs.d.result(WAIT)
        if output.finish_reason == "error":
            return False
        return legs.right().external_cached_tokens == 99

    eventually(f"{pair.p.engine.name} sends to {pair.d.engine.name}", moved)


def registered(side, joined):
    """Its two sessions are back, who had joined so often, and its pool is mapped."""
    return joins(side) >= joined + 2 and any(
        engine.engine_id == side.engine.name and engine.ranks_ready == engine.local_ranks
        for engine in side.node.engines()
    )


def joins(side):
    """How often a session of its engine was taken in, by its daemon's log."""
    lines = side.node.log.read_text().splitlines()
    return sum("engine joined" in line and side.engine.name in line for line in lines)


def in_flight(pair, seed):
    """A prompt whose bytes are moving while P still computes."""
    pair.p.engine.set_clock(SLOW)
    legs = pair.at_once(prompt(800, seed))
    eventually("bytes move", lambda: phase(pair.d.node, legs.transfer_id) == admin_pb2.PHASE_MOVING)
    return legs


def test_an_engine_without_a_daemon_ends_at_once_and_says_what_to_do(harness, model, tmp_path):
    nobody = Node("absent", tmp_path)
    with (
        launch(harness, "lonely", "kv_consumer", nobody, model, extra={"start_timeout": 1.0}) as lonely,
        pytest.raises(EngineFailed) as failed,
    ):
        lonely.ready(START)
    assert "exit status 1" in str(failed.value)
    said = lonely.log.read_text()
    assert f"kvpushd at {nobody.runtime_dir / 'kvpushd.sock'}" in said
    assert "systemctl status kvpushd" in said


def test_d_s_daemon_is_killed_while_bytes_move_and_d_computes_the_prompt(trio):
    pair, _ = trio
    legs = in_flight(pair, "D's daemon dies")
    pair.d.node.kill()
    legs.right()
    # Away, it is not waited for.
    assert pair.at_once(prompt(60, "daemon away")).right().external_cached_tokens == 0
    pair.d.node.start()


def test_p_s_daemon_is_killed_while_bytes_move_and_d_computes_the_prompt(trio):
    pair, _ = trio
    legs = in_flight(pair, "P's daemon dies")
    pair.p.node.kill()
    legs.right()
    assert legs.p.result(WAIT).token_ids == answer(legs.tokens, 1)
    assert pair.at_once(prompt(60, "daemon away")).right().external_cached_tokens == 0
    pair.p.node.start()


def test_under_the_policy_fail_a_request_ends_in_an_error_and_the_engine_lives(trio):
    _, failing = trio
    legs = in_flight(failing, "an error")
    failing.p.node.kill()
    assert legs.d.result(WAIT).finish_reason == "error"
    alone = prompt(60, "alone")
    assert failing.d.engine.submit(alone, 4).result(WAIT).token_ids == answer(alone, 4)
    failing.p.node.start()


def test_the_first_request_after_a_restart_of_idle_engines_daemons_moves(trio):
    _, failing = trio
    sides = {side: joins(side) for side in (failing.p, failing.d)}
    for side in sides:
        side.node.kill()
        side.node.start()
    for side, joined in sides.items():  # and nobody asks them anything meanwhile
        eventually(f"{side.engine.name} is registered", lambda s=side, n=joined: registered(s, n))
    assert failing.at_once(prompt(100, "the first")).right().external_cached_tokens == 99


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_mover_is_killed_while_bytes_move_and_d_computes_the_prompt(trio, side):
    pair, _ = trio
    legs = in_flight(pair, f"the mover of {side}")
    node = getattr(pair, side).node
    killed = node.mover_pid
    os.kill(killed, signal.SIGKILL)
    legs.right()
    eventually("another mover", lambda: node.status().movers[0].pid not in (0, killed))


def test_a_daemon_that_stops_answers_again_and_nothing_is_wrong(trio):
    pair, _ = trio
    legs = in_flight(pair, "P's daemon stops")
    pair.p.node.signal(signal.SIGSTOP)
    legs.right()
    pair.p.node.signal(signal.SIGCONT)


@pytest.mark.parametrize("doomed", ["P", "D"])
def test_an_engine_is_killed_while_bytes_move_and_another_takes_its_name(harness, model, cast, doomed):
    name, role = f"doomed-{doomed}", "kv_producer" if doomed == "P" else "kv_consumer"
    survivor = cast["D" if doomed == "P" else "P"]

    def begin():
        return launch(harness, name, role, cast[doomed].node, model)

    def pair_with(engine):
        mine = Side(engine, cast[doomed].node)
        return Pair(mine, survivor) if doomed == "P" else Pair(survivor, mine)

    with begin() as engine:
        engine.ready(START)
        pair = pair_with(engine)
        legs = in_flight(pair, f"{doomed} dies")
        engine.kill()
        engine.ended(WAIT)
    if doomed == "P":
        legs.right()
        assert name in pair.received(legs.transfer_id).fault.detail
    else:
        assert legs.p.result(WAIT).token_ids == answer(legs.tokens, 1)
        assert pair.sent(legs.transfer_id).fault.reason == types_pb2.REASON_ENGINE_GONE
        survivor.engine.set_clock(Clock())
    settle(survivor)
    with begin() as heir:
        heir.ready(START)
        moves_again(pair_with(heir))
        settle(survivor, Side(heir, cast[doomed].node))
