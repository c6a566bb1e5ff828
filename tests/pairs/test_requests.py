# SPDX-License-Identifier: Apache-2.0
"""What routers may say of a request: what can't be followed is computed where it is; engines live on."""

import secrets

import pytest

from kvpushctl.demo.ports import free_port
from pairs.kit import WAIT
from testing.engines import answer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

HUGE = 2**63
MISSING = object()

MANGLED = {
    "no engine": {"remote_engine_id": MISSING},
    "no host": {"remote_host": MISSING},
    "no port": {"remote_port": MISSING},
    "no peer at all": {"remote_engine_id": MISSING, "remote_host": MISSING, "remote_port": MISSING},
    "null peer": {"remote_engine_id": None, "remote_host": None, "remote_port": None},
    "engine is a list": {"remote_engine_id": ["P"]},
    "engine is empty": {"remote_engine_id": ""},
    "engine is endless": {"remote_engine_id": "P" * 100_000},
    "engine has zero bytes and half a surrogate": {"remote_engine_id": "P\0\ud800"},
    "host is a number": {"remote_host": 127},
    "host is a path": {"remote_host": "unix:///etc/passwd"},
    "host is several": {"remote_host": "127.0.0.1,127.0.0.2"},
    "host has a line feed": {"remote_host": "127.0.0.1\nX: y"},
    "host has half a surrogate": {"remote_host": "\ud800"},
    "host is no name": {"remote_host": "%s%n" * 50},
    "port is zero": {"remote_port": 0},
    "port is negative": {"remote_port": -1},
    "port is huge": {"remote_port": HUGE},
    "port is a truth": {"remote_port": True},
    "port is a fraction": {"remote_port": 7766.5},
    "port is not a number": {"remote_port": "nan"},
    "transfer is a number": {"transfer_id": HUGE},
    "transfer is an object": {"transfer_id": {"id": 1}},
    "transfer is endless": {"transfer_id": "f" * 100_000},
    "transfer has half a surrogate": {"transfer_id": "\ud800"},
    "flags are texts": {"do_remote_prefill": "true", "do_remote_decode": "false"},
    "both flags": {"do_remote_decode": True},
    "remote request is a list": {"transfer_id": None, "remote_request_id": []},
    "size is a text": {"tp_size": "many", "remote_block_ids": "all", "remote_port": None},
}


@pytest.mark.parametrize("kind", MANGLED)
def test_what_a_router_mangled_is_computed_on_d(pair, kind):
    params = pair.coordinates(secrets.token_bytes(16)) | MANGLED[kind]
    params = {name: value for name, value in params.items() if value is not MISSING}
    tokens = prompt(60, kind)
    output = pair.d.engine.submit(tokens, 3, params).result(WAIT)
    assert output.token_ids == answer(tokens, 3)
    assert output.external_cached_tokens == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_decode": "yes"},
        {"do_remote_decode": 1},
        {"transfer_id": []},
        {"transfer_id": "\ud800"},
        {"receiver_engine_id": {"D": 1}},
        {"receiver_engine_id": "\ud800"},
        {"do_remote_prefill": True, "do_remote_decode": True},
    ],
    ids=str,
)
def test_what_a_router_mangled_is_computed_on_p_and_returns_nothing(pair, changes):
    params = {"do_remote_decode": True, "do_remote_prefill": False} | changes
    tokens = prompt(60, changes)
    output = pair.p.engine.submit(tokens, 1, params).result(WAIT)
    assert output.token_ids == answer(tokens, 1)
    assert output.kv_transfer_params is None


def lost(pair, **changes):
    """A request of D's whose P is not there; returns its transfer on D's node."""
    transfer_id = secrets.token_bytes(16)
    tokens = prompt(60, transfer_id)
    output = pair.d.engine.submit(tokens, 3, pair.coordinates(transfer_id) | changes).result(WAIT)
    assert output.token_ids == answer(tokens, 3)
    assert output.external_cached_tokens == 0
    return pair.received(transfer_id)


def test_an_engine_that_nobody_knows_is_named_at_once(pair):
    assert "'nobody'" in lost(pair, remote_engine_id="nobody").fault.detail


def test_an_address_where_nobody_listens_is_named(pair):
    port = free_port()
    assert f"127.0.0.1:{port}" in lost(pair, remote_port=port).fault.detail


def test_a_host_that_does_not_answer_is_named(pair):
    # An address for documentation: no router carries it anywhere.
    assert "192.0.2.1" in lost(pair, remote_host="192.0.2.1").fault.detail


def test_a_host_that_has_no_address_is_named(pair):
    assert "nowhere.invalid" in lost(pair, remote_host="nowhere.invalid").fault.detail


def test_a_prompt_that_nobody_prefills_is_computed_on_d_when_its_lease_has_run_out(pair):
    assert "lease" in lost(pair).fault.detail


def test_a_prompt_that_nobody_fetches_is_released_when_its_lease_has_run_out(pair):
    transfer_id = secrets.token_bytes(16)
    pair.prefill(prompt(60, "unwanted"), transfer_id).result(WAIT)
    assert "lease" in pair.sent(transfer_id).fault.detail


def test_one_transfer_id_serves_one_request_and_the_other_is_computed(pair):
    first = pair.at_once(prompt(100, "twice"))
    second = pair.decode(prompt(120, "twice, other"), 4, first.transfer_id)
    assert first.right().external_cached_tokens == 99
    output = second.result(WAIT)
    assert output.token_ids == answer(prompt(120, "twice, other"), 4)
    assert output.external_cached_tokens == 0


def test_children_of_one_request_are_all_right(pair):
    """n > 1: vLLM gives all children the same params."""
    tokens = prompt(100, "children")
    first = pair.at_once(tokens)
    others = [pair.decode(tokens, 4, first.transfer_id) for _ in range(3)]
    first.right()
    for other in others:
        assert other.result(WAIT).token_ids == answer(tokens, 4)


def test_kv_of_another_prompt_is_not_taken_and_d_s_prefix_cache_is_not_spoilt(pair):
    """As where the chat templates of the two engines differ in a word."""
    ours, theirs = (prompt(100, "template", which) for which in ("D's", "P's"))
    transfer_id = secrets.token_bytes(16)
    sent = pair.prefill(theirs, transfer_id)
    output = pair.decode(ours, 4, transfer_id).result(WAIT)
    sent.result(WAIT)
    assert output.token_ids == answer(ours, 4)
    assert output.external_cached_tokens == 0
    for told in (pair.received(transfer_id), pair.sent(transfer_id)):
        assert "the same tokenizer and chat template" in told.fault.detail
    assert pair.d.engine.submit(ours, 4).result(WAIT).token_ids == answer(ours, 4)


def test_a_transfer_id_that_comes_again_at_p_holds_no_blocks(pair):
    """As where a client tries again with the request id of before; the pair looks for blocks afterwards."""
    first = pair.at_once(prompt(100, "again"))
    first.right()
    pair.sent(first.transfer_id)
    pair.prefill(prompt(100, "again, other"), first.transfer_id).result(WAIT)
    pair.prefill(prompt(100, "again, other"), first.transfer_id).result(WAIT)
