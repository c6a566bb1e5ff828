# SPDX-License-Identifier: Apache-2.0
"""What a router may say about a request, and what becomes of it."""

import pytest

from kvpush_client.items import Sender
from kvpush_client.vllm.params import Malformed, Receive, Send, answer, derived, parse

TRANSFER = "00112233445566778899aabbccddeeff"
UUID = "123e4567-e89b-12d3-a456-426614174000"
RECEIVE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_host": "node-p",
    "remote_port": 4711,
    "transfer_id": TRANSFER,
}


def test_no_params_ask_for_nothing():
    assert parse(None, "r", "E") is None
    assert parse({}, "r", "E") is None
    assert parse({"do_remote_prefill": False, "do_remote_decode": None}, "r", "E") is None


def test_ds_leg_names_the_sender_and_the_transfer():
    assert parse(RECEIVE, "r", "D") == Receive(bytes.fromhex(TRANSFER), Sender("P", "node-p", 4711))


def test_what_p_answers_is_ds_leg():
    send = parse({"do_remote_decode": True}, f"cmpl-{UUID}-0-deadbeef", "P")
    answered = answer(send, f"cmpl-{UUID}-0-deadbeef", "P", "node-p", 4711, tp_size=2)
    assert parse(answered, "other", "D") == Receive(send.transfer_id, Sender("P", "node-p", 4711))


def test_ps_leg_as_routers_send_it_with_nulls():
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": None,
    }
    assert isinstance(parse(params, "r", "P"), Send)


def test_a_transfer_id_that_is_no_hex_is_hashed_the_same_on_both_legs():
    sent = parse({"do_remote_decode": True, "transfer_id": "order 66"}, "a", "P")
    received = parse(RECEIVE | {"transfer_id": "order 66"}, "b", "D")
    assert sent.transfer_id == received.transfer_id
    assert len(sent.transfer_id) == 16


def test_a_receiver_may_be_named():
    assert parse({"do_remote_decode": True, "receiver_engine_id": "D"}, "r", "P").receiver_engine_id == "D"


def test_p_mints_another_id_each_time_where_there_is_no_uuid():
    ids = {parse({"do_remote_decode": True}, "0-12345678", "P").transfer_id for _ in range(8)}
    assert len(ids) == 8


@pytest.mark.parametrize(
    ("on_p", "on_d"),
    [
        (f"cmpl-{UUID}-0-0badcafe", f"cmpl-{UUID}-0-deadbeef"),
        (f"chatcmpl-{UUID}-0badcafe", f"chatcmpl-{UUID}-deadbeef"),
        (f"chatcmpl-{UUID.replace('-', '')}-0badcafe", f"chatcmpl-{UUID.upper()}-deadbeef"),
        (f"cmpl-___prefill_addr_H:1___decode_addr_I:2_{UUID}-0-0badcafe", f"cmpl-{UUID}-0-deadbeef"),
        (f"0_chatcmpl-{UUID}-0badcafe", f"1_chatcmpl-{UUID}-deadbeef"),
    ],
)
def test_both_legs_dispatched_at_once_derive_one_id_from_the_request_id_that_they_share(on_p, on_d):
    sent = parse({"do_remote_decode": True}, on_p, "P")
    static = {k: v for k, v in RECEIVE.items() if k != "transfer_id"}
    assert parse(static, on_d, "D").transfer_id == sent.transfer_id


def test_a_derived_id_differs_by_engine_request_and_prompt():
    other = UUID.replace("1", "2")
    ids = {
        derived("P", f"cmpl-{UUID}-0-deadbeef"),
        derived("Q", f"cmpl-{UUID}-0-deadbeef"),
        derived("P", f"cmpl-{other}-0-deadbeef"),
        derived("P", f"cmpl-{UUID}-1-deadbeef"),
    }
    assert len(ids) == 4
    assert None not in ids


def test_ps_request_id_counts_before_ds_own():
    static = {k: v for k, v in RECEIVE.items() if k != "transfer_id"}
    received = parse(static | {"remote_request_id": f"cmpl-{UUID}-0-deadbeef"}, "ignored", "D")
    assert received.transfer_id == derived("P", f"cmpl-{UUID}-0-0badcafe")


def test_a_port_may_be_said_in_digits():
    assert parse(RECEIVE | {"remote_port": "4711"}, "r", "D").sender.port == 4711


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ("text", "kv_transfer_params"),
        (["do_remote_prefill"], "kv_transfer_params"),
        (RECEIVE | {"do_remote_prefill": "yes"}, "do_remote_prefill"),
        (RECEIVE | {"do_remote_prefill": 1}, "do_remote_prefill"),
        (RECEIVE | {"do_remote_decode": True}, "do_remote_decode"),
        (RECEIVE | {"remote_engine_id": ""}, "remote_engine_id"),
        (RECEIVE | {"remote_engine_id": 7}, "remote_engine_id"),
        (RECEIVE | {"remote_host": None}, "remote_host"),
        (RECEIVE | {"remote_host": "h" * 2000}, "remote_host"),
        (RECEIVE | {"remote_port": 0}, "remote_port"),
        (RECEIVE | {"remote_port": 65536}, "remote_port"),
        (RECEIVE | {"remote_port": True}, "remote_port"),
        (RECEIVE | {"remote_port": "http"}, "remote_port"),
        (RECEIVE | {"remote_port": None}, "remote_port"),
        (RECEIVE | {"transfer_id": 5}, "transfer_id"),
        (RECEIVE | {"transfer_id": b"bytes"}, "transfer_id"),
        (RECEIVE | {"transfer_id": "half a surrogate \ud800"}, "transfer_id"),
        (RECEIVE | {"remote_host": "\udfff"}, "remote_host"),
        (RECEIVE | {"transfer_id": None}, "transfer_id"),
        ({"do_remote_decode": True, "transfer_id": ["x"]}, "transfer_id"),
        ({"do_remote_decode": True, "receiver_engine_id": 3}, "receiver_engine_id"),
    ],
)
def test_what_is_malformed_is_named(params, field):
    with pytest.raises(Malformed, match=field):
        parse(params, "no uuid here", "E")
