# SPDX-License-Identifier: Apache-2.0
"""The harness against vLLM's own NIXL connector, which pulls: what works here is no matter of ours."""

import pytest

from kvpushctl.demo.ports import free_port
from testing.clockwork.chain import reference

VOCAB = 2048
pytestmark = [pytest.mark.vllm, pytest.mark.nixl]

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def nixl(harness, model, name, role):
    return harness.engine(
        name,
        model=model,
        block_size=16,
        max_num_batched_tokens=64,
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "engine_id": name,
        },
        env={"UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
    )


@pytest.fixture(scope="module")
def pair(harness, model):
    """P and D, up."""
    with nixl(harness, model, "P", "kv_producer") as p, nixl(harness, model, "D", "kv_consumer") as d:
        p.ready(90)
        d.ready(90)
        yield p, d


def pull(pair, tokens, max_tokens):
    p, d = pair
    prefilled = p.submit(tokens, max_tokens=1, params=PREFILL).result(30)
    params = prefilled.kv_transfer_params | {"remote_host": "127.0.0.1"}
    return d.submit(tokens, max_tokens=max_tokens, params=params)


def test_a_pulled_prompt_is_answered_as_the_reference_and_all_blocks_come_back(pair, prompt):
    for length in (1, 16, 17, 200):
        tokens = prompt(length, seed=3)
        output = pull(pair, tokens, max_tokens=8).result(60)
        assert output.token_ids == reference(tokens, 8, VOCAB)
        assert output.external_cached_tokens >= length - 1
    for engine in pair:
        stats = engine.idle(30)
        assert stats.free_blocks == stats.blocks - 1
        assert stats.mismatches == ()


def test_a_byte_that_changes_on_d_is_named(pair, prompt):
    tokens = prompt(100, seed=4)
    _, d = pair
    d.corrupt(layer=3, head=0, position=60, byte=200)
    output = pull(pair, tokens, max_tokens=4).result(60)
    assert all(got != good for got, good in zip(output.token_ids, reference(tokens, 4, VOCAB), strict=True))
    first = d.stats().mismatches[0]
    assert (first.layer, first.head, first.position, first.byte) == (3, 0, 60, 200)
