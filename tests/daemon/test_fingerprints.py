# SPDX-License-Identifier: Apache-2.0
"""Engines of one shape whose KV differs in one field: refused on both sides at once, and the field named."""

from __future__ import annotations

import pytest

from kvpush_client.events import HandoffEnded, Reason, ReservationEnded
from testing.rank import BLOCK, new_key
from tests.daemon.daemon_kit import Nodes, transfer

pytestmark = pytest.mark.nixl

END = 4 * BLOCK

# A value of each field that `kvpush_client.vllm.fingerprint` gives, and another.
FIELDS = {
    "protocol": ("1", "2"),
    "model": ("3f2a", "77c1"),
    "compute": ("bfloat16 unquantized Qwen3ForCausalLM", "bfloat16 awq Qwen3ForCausalLM"),
    "adapter": ("none", 'default {"image": "/adapters/x"}'),
    "draft": ("none", "draft_model bfloat16 unquantized Qwen3ForCausalLM 8c1d"),
    "max_model_len": ("short factors of longrope", "long factors of longrope"),
    "kv_dtype": ("uint8 fp8_per_tensor fp8_e4m3", "uint8 fp8_per_tensor fp8_e5m2"),
    "kv_scales": ("checkpoint", "calculated by engine P"),
    "attention": ("CPU_ATTN isa=amx", "CPU_ATTN isa=vec"),
    "rope": ('{"rope_theta": 10000.0}', '{"rope_theta": 20000.0}'),
    "head_size": ("64", "128"),
}
USUAL = {name: usual for name, (usual, _) in FIELDS.items()}


def other(field: str) -> dict[str, str]:
    return USUAL | {field: FIELDS[field][1]}


@pytest.mark.parametrize("handed_off", [True, False], ids=["the handoff first", "the reservation first"])
@pytest.mark.parametrize("field", FIELDS)
def test_both_sides_are_told_the_field_that_differs(nodes: Nodes, field: str, handed_off: bool) -> None:
    p = nodes.engine(nodes.p, fingerprint=USUAL)
    d = nodes.engine(nodes.d, fingerprint=other(field))
    key = new_key()
    if handed_off:
        p.hand_off(key, range(4), END, lease=600)
    d.reserve(key, p, range(4), END)
    received = d.wait_for(ReservationEnded, key)
    if not handed_off:
        p.hand_off(key, range(4), END, lease=600)
    sent = p.wait_for(HandoffEnded, key)
    for fault in (received.fault, sent.fault):
        assert fault is not None
        assert fault.reason is Reason.FINGERPRINT_MISMATCH
        assert fault.detail.startswith(f"{field} is {FIELDS[field][0]!r} here and {FIELDS[field][1]!r} there")
    assert not d.read(range(4), 0, END).any()


@pytest.mark.parametrize("side", ["the sender", "the receiver"])
def test_a_field_that_only_one_side_has_is_a_difference(nodes: Nodes, side: str) -> None:
    more = USUAL | {"revision": "main"}
    p = nodes.engine(nodes.p, fingerprint=more if side == "the sender" else USUAL)
    d = nodes.engine(nodes.d, fingerprint=USUAL if side == "the sender" else more)
    key = new_key()
    d.reserve(key, p, range(4), END)
    fault = d.wait_for(ReservationEnded, key).fault
    assert fault is not None
    assert fault.reason is Reason.FINGERPRINT_MISMATCH
    assert "revision is " in fault.detail


def test_on_one_node_too(nodes: Nodes) -> None:
    p = nodes.engine(nodes.p, fingerprint=USUAL)
    d = nodes.engine(nodes.p, fingerprint=other("rope"))
    key = new_key()
    p.hand_off(key, range(4), END, lease=600)
    d.reserve(key, p, range(4), END)
    for kind, engine in ((ReservationEnded, d), (HandoffEnded, p)):
        fault = engine.wait_for(kind, key).fault
        assert fault is not None
        assert fault.detail.startswith("rope is ")


def test_equal_ones_are_understood(nodes: Nodes) -> None:
    transfer(nodes.engine(nodes.p, fingerprint=USUAL), nodes.engine(nodes.d, fingerprint=dict(USUAL)))
