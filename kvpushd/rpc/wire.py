# SPDX-License-Identifier: Apache-2.0
"""The shared words between `kvpush.v1` messages (types.proto) and the core's values.

What comes in was written by an engine or a peer: whatever cannot be read raises Invalid, naming the field.
Reading bounds what a message may cost. Whether a layout's addresses lie in its pool, and blocks exist, is
for `layout.check` and `layout.check_blocks` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from kvpush_client import wire
from kvpush_client._proto import types_pb2
from kvpush_client.events import Counts, Fault, TransferKey
from kvpush_client.wire import counts_to_wire, fault_to_wire, key_to_wire, layout_to_wire
from kvpushd.core import fingerprint
from kvpushd.core.layout import MAX_GROUPS, MAX_LAYERS, MAX_PLANES, MAX_POOL_BYTES, Blocks, Layout
from kvpushd.core.words import Incarnation
from kvpushd.errors import Invalid

# Longer than any detail of ours, short enough to keep and to show.
MAX_DETAIL = 2048
INCARNATION_BYTES = 16
# Writes of one transfer: the sum over as many senders as a reservation may have still fits its field.
MAX_CHUNKS = 1 << 23


def layout_from_wire(message: types_pb2.Layout, field: str = "layout") -> Layout:
    """A layout, not yet checked. Raises Invalid where it is too large to be one, or a kind is unknown."""
    _at_most(f"{field}.groups", len(message.groups), MAX_GROUPS)
    _at_most(f"{field}.layers", len(message.layers), MAX_LAYERS)
    for index, layer in enumerate(message.layers):
        _at_most(f"{field}.layers[{index}].planes", len(layer.planes), MAX_PLANES)
    with _named(field):
        return wire.layout_from_wire(message)


def blocks_from_wire(messages: Iterable[types_pb2.Blocks], field: str = "blocks") -> tuple[Blocks, ...]:
    """Block lists, one per group, not yet checked. Raises Invalid where a group is listed twice."""
    lists: list[Blocks] = []
    groups: set[int] = set()
    for index, message in enumerate(messages):
        if message.group in groups:
            raise Invalid(f"{field}[{index}]: group {message.group} is listed twice: name each group once")
        groups.add(message.group)
        _at_most(f"{field}", len(groups), MAX_GROUPS)
        lists.append(Blocks(message.group, message.start, np.array(message.block_ids, np.int64)))
    return tuple(lists)


def blocks_to_wire(lists: Iterable[Blocks]) -> list[types_pb2.Blocks]:
    """Block lists as messages."""
    return [types_pb2.Blocks(group=b.group, start=b.start, block_ids=b.ids.tolist()) for b in lists]


def key_from_wire(message: types_pb2.TransferKey, field: str = "key") -> TransferKey:
    """A key. Raises Invalid unless the transfer_id is 16 bytes."""
    with _named(field):
        return wire.key_from_wire(message)


def incarnation_from_wire(said: bytes, field: str = "incarnation") -> Incarnation:
    """An engine's incarnation. Raises Invalid unless it has INCARNATION_BYTES."""
    if len(said) != INCARNATION_BYTES:
        raise Invalid(f"{field} has {len(said)} bytes, expected {INCARNATION_BYTES}")
    return Incarnation(said)


def name_from_wire(value: str, field: str, *, empty: bool = False) -> str:
    """What names an engine or an agent. Raises Invalid where it is empty, or too long to be kept."""
    with _named(field):
        return wire.text(field, value, empty=empty)


def digest_from_wire(said: bytes, field: str) -> bytes:
    """A digest. Raises Invalid where it is too long to be one."""
    with _named(field):
        return wire.digest("digest", said)


def fault_from_wire(message: types_pb2.Fault) -> Fault:
    """A fault, its detail cut to what can be kept; a reason of a later version becomes UNSPECIFIED."""
    fault = wire.fault_from_wire(message)
    return Fault(fault.reason, fault.detail[:MAX_DETAIL])


def counts_from_wire(message: types_pb2.TransferCounts, field: str = "counts") -> Counts:
    """Counts. Raises Invalid where a part is more than the whole, or one is more than can be added up."""
    counts = wire.counts_from_wire(message)
    for name, most in (("bytes", MAX_POOL_BYTES), ("chunks", MAX_CHUNKS), ("runs", MAX_POOL_BYTES)):
        if getattr(counts, name) > most:
            raise Invalid(f"{field}.{name} is {getattr(counts, name)}, expected {most} or less")
    if counts.chunks_before_seal > counts.chunks:
        raise Invalid(f"{field}.chunks_before_seal is {counts.chunks_before_seal}, of {counts.chunks} chunks")
    return counts


def fingerprint_from_wire(message: types_pb2.Fingerprint, field: str = "fingerprint") -> Mapping[str, str]:
    """The fields of a fingerprint. Raises Invalid where they are too many or too long."""
    fields = dict(message.fields)
    try:
        fingerprint.check(fields)
    except Invalid as error:
        raise Invalid(f"{field}: {error}") from None
    return fields


def fingerprint_to_wire(fields: Mapping[str, str]) -> types_pb2.Fingerprint:
    """The fields of a fingerprint as a message."""
    return types_pb2.Fingerprint(fields=fields)


@contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except wire.Malformed as error:
        raise Invalid(f"{field}: {error}") from None


def _at_most(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise Invalid(f"{field} has {count} items, expected {limit} or fewer")


__all__ = [
    "blocks_from_wire",
    "blocks_to_wire",
    "counts_from_wire",
    "counts_to_wire",
    "digest_from_wire",
    "fault_from_wire",
    "fault_to_wire",
    "fingerprint_from_wire",
    "fingerprint_to_wire",
    "key_from_wire",
    "key_to_wire",
    "layout_from_wire",
    "layout_to_wire",
    "name_from_wire",
]
