# SPDX-License-Identifier: Apache-2.0
"""Prompts of all lengths, dispatched in every order: each byte is where it must be."""

import uuid

import pytest

from pairs.kit import WAIT
from testing.clockwork.clock import Clock
from testing.engines import BLOCK, PREFILL, answer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1, 64, 65, 200, 2000)


def external(length):
    """What comes from elsewhere of a prompt: nothing where one block is all that is missing."""
    return length - 1 if length - 1 >= BLOCK else 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("order", ["P first", "D first", "in turn"])
def test_a_prompt_of_any_length_arrives_whole(pair, order, length):
    tokens = prompt(length, order)
    legs = pair.in_turn(tokens) if order == "in turn" else pair.at_once(tokens, d_first=order == "D first")
    pair.moved(legs, external(length))
    assert legs.p.result(WAIT).token_ids == answer(tokens, 1)


def test_p_names_a_transfer_that_the_router_did_not_name(pair):
    tokens = prompt(100, "unnamed")
    answered = pair.p.engine.submit(tokens, 1, PREFILL).result(WAIT).kv_transfer_params
    output = pair.d.engine.submit(tokens, 4, answered).result(WAIT)
    assert output.token_ids == answer(tokens, 4)
    assert output.external_cached_tokens == 99


def test_both_legs_find_each_other_by_the_request_id_that_they_share(pair):
    tokens, shared = prompt(200, "by request id"), f"cmpl-{uuid.uuid4()}-0"
    unnamed = pair.coordinates(b"")
    del unnamed["transfer_id"]
    on_d = pair.d.engine.submit(tokens, 4, unnamed, request_id=shared)
    pair.p.engine.submit(tokens, 1, PREFILL, request_id=shared)
    output = on_d.result(WAIT)
    assert output.token_ids == answer(tokens, 4)
    assert output.external_cached_tokens == 199


@pytest.mark.parametrize("many", [8, 24])
def test_many_prompts_at_once_arrive_whole(pair, many):
    lengths = [20 + 37 * i % 400 for i in range(many)]
    sent = [
        pair.at_once(prompt(length, f"{many}-{i}"), d_first=i % 2 == 0) for i, length in enumerate(lengths)
    ]
    for legs, length in zip(sent, lengths, strict=True):
        pair.moved(legs, external(length))


def test_a_prefix_that_p_has_cached_moves_too(pair):
    tokens = prompt(150, "P hits")
    pair.at_once(tokens).right()
    pair.d.engine.idle(WAIT)
    assert pair.d.engine.reset_prefix_cache()
    legs = pair.at_once(tokens)
    assert legs.right().external_cached_tokens == 149
    assert legs.p.result(WAIT).local_cached_tokens == 144


@pytest.mark.parametrize("common", [BLOCK, 5 * BLOCK, 5 * BLOCK + 6])
@pytest.mark.parametrize("order", ["at_once", "in_turn"])
def test_a_prefix_that_d_has_cached_is_not_moved_again(pair, order, common):
    tokens = prompt(150, f"D hits {common} {order}")
    pair.d.engine.submit([*tokens[:common], *prompt(20, "other")], 1).result(WAIT)
    output = getattr(pair, order)(tokens).right()
    assert output.local_cached_tokens == common // BLOCK * BLOCK
    assert output.external_cached_tokens == 149 - output.local_cached_tokens


@pytest.mark.parametrize("order", ["at_once", "in_turn"])
def test_a_prompt_that_d_has_wholly_cached_waits_for_nobody_and_p_is_told(pair, order):
    tokens = prompt(160, f"D has it all {order}")
    pair.at_once(tokens).right()
    legs = getattr(pair, order)(tokens)
    assert legs.right().external_cached_tokens == 0
    # Not the lease: a message from D released it.
    assert "lease" not in pair.sent(legs.transfer_id).fault.detail


def test_prompts_that_share_a_prefix_arrive_whole(pair):
    shared = prompt(100, "shared")
    sent = [pair.at_once(shared + prompt(10 + 30 * i, f"own {i}"), d_first=i % 2 == 0) for i in range(8)]
    for legs in sent:
        legs.right()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 40, 64, 65, 200])
@pytest.mark.parametrize("order", ["at_once", "in_turn"])
def test_a_router_may_add_p_s_first_token_to_d_s_prompt(pair, order, length):
    tokens = prompt(length, f"one more {order}")
    longer = tokens + answer(tokens, 1)
    legs = getattr(pair, order)(tokens, longer=longer)
    pair.moved(legs, external(length + 1))


def test_chunks_land_before_prefill_has_ended(pair):
    pair.p.engine.set_clock(Clock(seconds_per_prompt_token=0.005))
    legs = pair.at_once(prompt(640, "slow"))
    legs.right()
    transfer = pair.received(legs.transfer_id)
    assert transfer.counts.chunks_before_seal > 0
    assert 0 < transfer.sender_times.first_landed_unix_ns < transfer.sender_times.sealed_unix_ns


def test_a_finished_prompt_moves_while_p_computes_another(pair):
    pair.p.engine.set_clock(Clock(seconds_per_prompt_token=0.002))
    short, long = prompt(128, "short"), prompt(1280, "long")
    first = pair.at_once(short)
    second = pair.at_once(long)
    assert first.right().t_first < second.p.result(WAIT).t_last
    second.right()
