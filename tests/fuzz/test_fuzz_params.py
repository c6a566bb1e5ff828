# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` as routers would mangle them: followed, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush_client import item_wire
from kvpush_client.events import TransferKey
from kvpush_client.items import Handoff, Reserve
from kvpush_client.layout import Blocks
from kvpush_client.vllm.params import Malformed, Receive, Send, answer, parse

CORPUS = sorted((Path(__file__).parent / "corpus" / "params").glob("*.json"))

NAMES = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "remote_block_ids",
    "tp_size",
    "transfer_id",
    "receiver_engine_id",
)
RIGHT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_host": "127.0.0.1",
    "remote_port": 7766,
    "transfer_id": "0" * 32,
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(st.characters(exclude_categories=())),  # half a surrogate pair is JSON too
    st.sampled_from(["", "0", "7766", "\uff17", "x" * 600, "x" * 2000, "0" * 32, "Infinity", "²"]),
)
SHAPES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
)
MANGLED = st.dictionaries(st.sampled_from(NAMES), SHAPES)


def follow(params: Any) -> None:
    """What the connector does with them, up to the message."""
    try:
        said: object = parse(params, "cmpl-0", "E")
    except Malformed as error:
        said = error
    key = TransferKey(b"k" * 16)
    if isinstance(said, Malformed):
        assert 0 < len(str(said)) < 500, said
        return
    if isinstance(said, Receive):
        assert len(said.transfer_id) == 16
        item: Reserve | Handoff = Reserve(key, (said.sender,), 0, 16, (Blocks(0, 0, (1,)),))
    elif isinstance(said, Send):
        assert len(said.transfer_id) == 16
        json.dumps(answer(said, "cmpl-0", "E", "h", 1, 1))
        item = Handoff(key, (), receiver_engine_id=said.receiver_engine_id)
    else:
        return
    assert item_wire.item_from_wire(item_wire.item_to_wire(item)) == item


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.stem)
def test_what_was_found_once_is_borne(entry: Path) -> None:
    follow(json.loads(entry.read_text()))


@settings(derandomize=True, database=None)
@given(SHAPES)
def test_any_shape_is_followed_or_refused(params: Any) -> None:
    follow(params)


@settings(derandomize=True, database=None, max_examples=500)
@given(MANGLED)
def test_any_value_of_any_field_is_followed_or_refused(changes: dict[str, Any]) -> None:
    for base in ({}, RIGHT, {"do_remote_decode": True}):
        follow(base | changes)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=20_000)
@given(MANGLED, st.booleans())
def test_a_lot_of_mangled_params_are_followed_or_refused(changes: dict[str, Any], right: bool) -> None:
    follow((RIGHT if right else {}) | changes)
