# SPDX-License-Identifier: Apache-2.0
"""P and D with the connector, two daemons between them, every cell checked."""

import uuid

import pytest
from pair_kit import DEADLINE, SEND, Pair, eventually, right

from testing.clockwork.clock import Clock

pytestmark = [pytest.mark.vllm, pytest.mark.nixl]

SLOW = Clock(seconds_per_prompt_token=0.002)
FAST = Clock()


@pytest.fixture(scope="module")
def shared(harness, models, tmp_path_factory):
    with Pair(harness, tmp_path_factory.mktemp("pair"), models["plain"], enable_prefix_caching=True) as pair:
        yield pair


@pytest.fixture
def pair(shared):
    yield shared
    for engine in (shared.p, shared.d):
        engine.set_clock(FAST)
    shared.settle()


@pytest.mark.parametrize("length", [1, 2, 17, 18, 64, 65, 300])
def test_one_after_the_other_gives_the_reference(pair, prompt, length):
    tokens = prompt(length, seed=1)
    assert right(pair.one_after_the_other(tokens), tokens)


def test_what_comes_from_p_is_all_but_the_last_position(pair, prompt):
    assert pair.one_after_the_other(prompt(300, seed=2)).external_cached_tokens == 299


def test_both_at_once_give_the_reference_and_most_has_moved_before_the_prompt_is_done(pair, prompt):
    tokens = prompt(400, seed=3)
    pair.p.set_clock(SLOW)
    on_p, on_d = pair.at_once(tokens)
    transfer_id = on_p.result(DEADLINE).kv_transfer_params["transfer_id"]
    assert right(on_d.result(DEADLINE), tokens)
    [transfer] = pair.d_node.transfers(bytes.fromhex(transfer_id))
    assert transfer.counts.chunks_before_seal > 0


def test_both_at_once_find_each_other_by_the_request_id_that_they_share(pair, prompt):
    tokens, shared_id = prompt(200, seed=4), str(uuid.uuid4())
    on_d = pair.d.submit(tokens, max_tokens=8, params=pair.coordinates, request_id=f"cmpl-{shared_id}-0")
    pair.p.submit(tokens, max_tokens=1, params=SEND, request_id=f"cmpl-{shared_id}-0")
    output = on_d.result(DEADLINE)
    assert right(output, tokens)
    assert output.external_cached_tokens == 199


def test_eight_at_once_each_get_their_own(pair, prompt):
    prompts = [prompt(150 + 10 * i, seed=5) for i in range(8)]
    requests = [pair.at_once(tokens) for tokens in prompts]
    for (_, on_d), tokens in zip(requests, prompts, strict=True):
        output = on_d.result(DEADLINE)
        assert right(output, tokens)
        assert output.external_cached_tokens == len(tokens) - 1


def test_ds_prefix_is_not_sent_again(pair, prompt):
    prefix = prompt(160, seed=6)
    pair.one_after_the_other(prefix + prompt(40, seed=7))
    tokens = prefix + prompt(60, seed=8)
    output = pair.one_after_the_other(tokens)
    assert right(output, tokens)
    assert output.local_cached_tokens == 160
    assert output.external_cached_tokens == 59


def test_a_full_prefix_hit_on_d_waits_for_nobody(pair, prompt):
    tokens = prompt(170, seed=9)
    pair.one_after_the_other(tokens)
    output = pair.one_after_the_other(tokens)
    assert right(output, tokens)
    assert output.external_cached_tokens == 0


def test_ps_prefix_hit_is_handed_off_as_what_it_computes(pair, prompt):
    tokens = prompt(200, seed=10)
    pair.p.submit(tokens, max_tokens=1).result(DEADLINE)
    output = pair.one_after_the_other(tokens)
    assert right(output, tokens)
    assert output.external_cached_tokens == 199


def test_two_prompts_with_one_prefix_in_the_same_step(pair, prompt):
    prefix = prompt(32, seed=11)
    prompts = [prefix + prompt(20, seed=seed) for seed in (12, 13, 14)]
    requests = [pair.at_once(tokens) for tokens in prompts]
    for (_, on_d), tokens in zip(requests, prompts, strict=True):
        assert right(on_d.result(DEADLINE), tokens)


def test_a_request_without_a_transfer_is_an_ordinary_one(pair, prompt):
    tokens = prompt(100, seed=15)
    assert right(pair.d.submit(tokens, max_tokens=4).result(DEADLINE), tokens)


@pytest.mark.parametrize("params", [{"do_remote_prefill": "yes"}, {"do_remote_prefill": True}])
def test_malformed_params_are_computed_locally(pair, prompt, params):
    tokens = prompt(100, seed=16)
    assert right(pair.d.submit(tokens, max_tokens=4, params=params).result(DEADLINE), tokens)


def test_a_duplicate_of_a_live_transfer_is_computed_locally(pair, prompt):
    tokens = prompt(300, seed=17)
    pair.p.set_clock(SLOW)
    named = {"transfer_id": uuid.uuid4().hex}
    first, second = (pair.d.submit(tokens, max_tokens=4, params=pair.coordinates | named) for _ in range(2))
    pair.prefill(tokens, **named)
    outputs = [request.result(DEADLINE) for request in (first, second)]
    assert all(right(output, tokens) for output in outputs)
    assert sorted(output.external_cached_tokens for output in outputs) == [0, 299]


def test_a_request_aborted_while_it_waits_frees_its_blocks(pair, prompt):
    transfer_id = uuid.uuid4()
    params = pair.coordinates | {"transfer_id": transfer_id.hex}
    request = pair.d.submit(prompt(200, seed=18), max_tokens=4, params=params)
    eventually(lambda: pair.d_node.transfers(transfer_id.bytes), "the reservation")
    pair.d.abort(request.request_id)
    assert request.result(DEADLINE).finish_reason == "abort"


def test_a_prompt_aborted_on_p_is_computed_by_d(pair, prompt):
    tokens = prompt(1000, seed=19)
    pair.p.set_clock(SLOW)
    on_p, on_d = pair.at_once(tokens)
    eventually(lambda: pair.p.stats().running, "P to begin")
    pair.p.abort(on_p.request_id)
    pair.p.set_clock(FAST)
    output = on_d.result(DEADLINE)
    assert right(output, tokens)
    assert output.finish_reason == "length"


def test_a_receiver_aborted_in_the_middle_harms_neither(pair, prompt):
    tokens = prompt(600, seed=20)
    pair.p.set_clock(SLOW)
    on_p, on_d = pair.at_once(tokens)
    eventually(lambda: pair.p.stats().running, "P to begin")
    pair.d.abort(on_d.request_id)
    on_p.result(DEADLINE)
    again = prompt(300, seed=21)
    assert right(pair.one_after_the_other(again), again)


def test_a_sender_that_nobody_knows_fails_at_once_and_d_computes(pair, prompt):
    tokens = prompt(100, seed=22)
    unknown = pair.coordinates | {"remote_engine_id": "nobody", "transfer_id": uuid.uuid4().hex}
    output = pair.d.submit(tokens, max_tokens=4, params=unknown).result(5)
    assert right(output, tokens)
