# SPDX-License-Identifier: Apache-2.0
"""The shared words between messages and the core's values."""

from __future__ import annotations

import numpy as np
import pytest

from kvpush_client._proto import types_pb2
from kvpush_client.events import Counts, Fault, Reason, TransferKey
from kvpush_client.layout import Group, GroupKind
from kvpushd.errors import Invalid
from kvpushd.rpc import wire
from tests.core.pools import Model, Shape, listed, rank

LAYOUT = rank(
    Model((0, 1, 0), heads=4, planes=(4, 2), opaque=True),
    Shape((Group(4), Group(4, GroupKind.SLIDING_WINDOW)), padding=16),
    heads=range(2, 4),
    replica=1,
    replicas=2,
)


def test_a_layout_comes_back_as_it_went() -> None:
    sent = wire.layout_to_wire(LAYOUT).SerializeToString()
    assert wire.layout_from_wire(types_pb2.Layout.FromString(sent)) == LAYOUT


def test_block_lists_come_back_as_they_went() -> None:
    sent = [listed(0, 3, 1, 2**31), listed(64, group=1)]
    back = wire.blocks_from_wire(wire.blocks_to_wire(sent))
    assert [(b.group, b.start, b.ids.tolist()) for b in back] == [(0, 0, [3, 1, 2**31]), (1, 64, [])]
    assert all(b.ids.dtype == np.int64 for b in back)


def test_keys_faults_counts_and_fingerprints_come_back_as_they_went() -> None:
    key, fault, counts = TransferKey(bytes(range(16)), 3), Fault(Reason.EXPIRED, "late"), Counts(9, 3, 2, 7)
    assert wire.key_from_wire(wire.key_to_wire(key)) == key
    assert wire.fault_from_wire(wire.fault_to_wire(fault)) == fault
    assert wire.counts_from_wire(wire.counts_to_wire(counts)) == counts
    assert wire.fingerprint_from_wire(wire.fingerprint_to_wire({"model": "x"})) == {"model": "x"}


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_transfer_id_of_another_size_is_refused_with_the_fields_name(size: int) -> None:
    with pytest.raises(Invalid, match=rf"announce\.key: transfer_id is {size} bytes"):
        wire.key_from_wire(types_pb2.TransferKey(transfer_id=bytes(size)), "announce.key")


@pytest.mark.parametrize("kind", [types_pb2.GROUP_KIND_UNSPECIFIED, 77])
def test_a_group_of_no_known_kind_is_refused(kind: types_pb2.GroupKind.ValueType) -> None:
    message = wire.layout_to_wire(LAYOUT)
    message.groups[1].kind = kind
    with pytest.raises(Invalid, match=r"layout: groups\[1\]\.kind is"):
        wire.layout_from_wire(message)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (types_pb2.Layout(groups=[types_pb2.Group()] * 65), "pool.groups has 65"),
        (types_pb2.Layout(layers=[types_pb2.Layer()] * 4097), "pool.layers has 4097"),
        (
            types_pb2.Layout(layers=[types_pb2.Layer(planes=[types_pb2.Plane()] * 9)]),
            r"pool.layers\[0\].planes has 9",
        ),
    ],
)
def test_a_layout_too_large_to_be_one_is_refused_unread(message: types_pb2.Layout, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        wire.layout_from_wire(message, "pool")


def test_a_group_listed_twice_is_refused() -> None:
    with pytest.raises(Invalid, match=r"blocks\[1\]: group 0 is listed twice"):
        wire.blocks_from_wire([types_pb2.Blocks(block_ids=[1]), types_pb2.Blocks(start=4, block_ids=[2])])


def test_more_block_lists_than_a_layout_can_have_groups_are_refused() -> None:
    with pytest.raises(Invalid, match="blocks has 65 items"):
        wire.blocks_from_wire([types_pb2.Blocks(group=n) for n in range(65)])


def test_a_reason_of_a_later_version_is_kept_in_words() -> None:
    fault = wire.fault_from_wire(types_pb2.Fault(reason=types_pb2.Reason.ValueType(99), detail="x" * 4000))
    assert fault.reason is Reason.UNSPECIFIED
    assert fault.detail.startswith("reason 99: xxx")
    assert len(fault.detail) == wire.MAX_DETAIL


def test_counts_whose_part_exceeds_the_whole_are_refused() -> None:
    with pytest.raises(Invalid, match="chunks_before_seal is 2, of 1 chunks"):
        wire.counts_from_wire(types_pb2.TransferCounts(chunks=1, chunks_before_seal=2))


def test_a_fingerprint_too_large_to_keep_is_refused_with_the_fields_name() -> None:
    with pytest.raises(Invalid, match=r"hello\.fingerprint: fingerprint field 'x': value of 2000"):
        wire.fingerprint_from_wire(types_pb2.Fingerprint(fields={"x": "y" * 2000}), "hello.fingerprint")


@pytest.mark.parametrize("size", [0, 15, 17, 1 << 20])
def test_an_incarnation_of_another_length_is_refused(size: int) -> None:
    """Whatever is kept of what a peer says is kept by its engine's incarnation."""
    with pytest.raises(Invalid, match=rf"announce\.incarnation has {size} bytes, expected 16"):
        wire.incarnation_from_wire(b"x" * size, "announce.incarnation")
