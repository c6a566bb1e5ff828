# SPDX-License-Identifier: Apache-2.0
"""Requests that end before they should: nobody waits for them, and nothing writes where they were."""

import random
import secrets

import pytest

from kvpush_client._proto import admin_pb2
from pairs.kit import WAIT, eventually, phase
from testing.clockwork.clock import Clock
from testing.engines import answer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

SLOW = Clock(seconds_per_prompt_token=0.004)


@pytest.fixture
def next_ones(pair):
    """After the test: requests into the blocks that were just given back are right."""
    yield pair
    for engine in (pair.p.engine, pair.d.engine):
        engine.set_clock(Clock())
    sent = [pair.at_once(prompt(300, secrets.token_hex(4)), d_first=i % 2 == 0) for i in range(4)]
    for legs in sent:
        legs.right()


def moving(pair, legs):
    eventually("bytes move", lambda: phase(pair.d.node, legs.transfer_id) == admin_pb2.PHASE_MOVING)


def busy(engine, length=600):
    """Gives an engine something to compute, so that what comes after it queues."""
    return engine.submit(prompt(length, "busy"), 1)


def test_d_aborts_before_p_has_heard_of_it(next_ones):
    transfer_id = secrets.token_bytes(16)
    waiting = next_ones.decode(prompt(200, "early"), 4, transfer_id)
    eventually("D has reserved", lambda: phase(next_ones.d.node, transfer_id) is not None)
    next_ones.d.engine.abort(waiting.request_id)
    assert waiting.result(WAIT).finish_reason == "abort"
    # P comes after all, and is told.
    assert next_ones.prefill(prompt(200, "early"), transfer_id).result(WAIT).token_ids


def test_d_aborts_while_p_has_it_queued(next_ones):
    next_ones.p.engine.set_clock(SLOW)
    before = busy(next_ones.p.engine)
    legs = next_ones.at_once(prompt(200, "queued at P"))
    next_ones.d.engine.abort(legs.d.request_id)
    assert legs.p.result(WAIT).token_ids == answer(legs.tokens, 1)
    before.result(WAIT)


def test_d_aborts_while_bytes_move(next_ones):
    next_ones.p.engine.set_clock(SLOW)
    legs = next_ones.at_once(prompt(600, "moving"))
    moving(next_ones, legs)
    next_ones.d.engine.abort(legs.d.request_id)
    assert legs.p.result(WAIT).token_ids == answer(legs.tokens, 1)


def test_d_aborts_after_all_has_landed(next_ones):
    next_ones.d.engine.set_clock(Clock(seconds_per_step=0.02))
    legs = next_ones.at_once(prompt(200, "landed"), count=400)
    legs.d.first_token(WAIT)
    next_ones.d.engine.abort(legs.d.request_id)
    assert legs.d.result(WAIT).finish_reason == "abort"


def test_p_aborts_while_it_has_it_queued_and_d_computes_it(next_ones):
    next_ones.p.engine.set_clock(SLOW)
    before = busy(next_ones.p.engine)
    legs = next_ones.at_once(prompt(200, "P gives up queued"))
    next_ones.p.engine.abort(legs.p.request_id)
    assert legs.right().external_cached_tokens == 0
    before.result(WAIT)


def test_p_aborts_while_bytes_move_and_d_computes_it(next_ones):
    next_ones.p.engine.set_clock(SLOW)
    legs = next_ones.at_once(prompt(600, "P gives up moving"))
    moving(next_ones, legs)
    next_ones.p.engine.abort(legs.p.request_id)
    legs.right()
    assert next_ones.received(legs.transfer_id).fault.detail


def test_p_aborts_its_leg_while_it_decodes_and_the_prompt_arrives_all_the_same(next_ones):
    next_ones.p.engine.set_clock(Clock(seconds_per_step=0.02))
    transfer_id, tokens = secrets.token_bytes(16), prompt(200, "P decodes")
    longer = next_ones.prefill(tokens, transfer_id, count=400)
    longer.first_token(WAIT)
    next_ones.p.engine.abort(longer.request_id)
    output = next_ones.decode(tokens, 4, transfer_id).result(WAIT)
    assert output.token_ids == answer(tokens, 4)
    assert output.external_cached_tokens == 199


def test_a_storm_of_aborts_leaves_nothing_behind(next_ones):
    chance = random.Random(7)
    next_ones.p.engine.set_clock(Clock(seconds_per_prompt_token=0.0002))
    sent = [next_ones.at_once(prompt(150 + 7 * i, f"storm {i}"), d_first=i % 2 == 0) for i in range(60)]
    doomed = chance.sample(sent, 50)
    for legs in doomed:
        if chance.random() < 0.8:
            next_ones.d.engine.abort(legs.d.request_id)
        if chance.random() < 0.5:
            next_ones.p.engine.abort(legs.p.request_id)
    for legs in sent:
        if legs not in doomed or legs.d.result(WAIT).finish_reason != "abort":
            legs.right()
