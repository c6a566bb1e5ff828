# SPDX-License-Identifier: Apache-2.0
"""The values that messages share, to and from `kvpush.v1` messages (types.proto, and sides).

Reading checks only what a message can be wrong in by itself, and raises Malformed; whether a layout's
addresses lie in its pool is for whoever computes addresses.
"""

from __future__ import annotations

from kvpush_client._proto import engine_pb2, types_pb2
from kvpush_client.events import Counts, Fault, Reason, Side, TransferKey
from kvpush_client.layout import Blocks, Group, GroupKind, Layer, Layout, Plane

TRANSFER_ID_BYTES = 16
MAX_TEXT = 512
"""Characters of an id, a host or a label."""
MAX_DIGEST = 32
"""Bytes."""
MAX_LEASE = (1 << 32) // 1000 - 1
"""Seconds: 49 days."""

_KINDS = {
    GroupKind.FULL: types_pb2.GROUP_KIND_FULL,
    GroupKind.SLIDING_WINDOW: types_pb2.GROUP_KIND_SLIDING_WINDOW,
    GroupKind.STATE: types_pb2.GROUP_KIND_STATE,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}
_SIDES = {Side.SENDER: engine_pb2.SIDE_SENDER, Side.RECEIVER: engine_pb2.SIDE_RECEIVER}
_SIDES_BACK = {number: side for side, number in _SIDES.items()}


class Malformed(ValueError):
    """A message, or a value on its way into one, is wrong; says what was expected."""


def key_to_wire(key: TransferKey) -> types_pb2.TransferKey:
    """Raises Malformed unless the transfer_id is 16 bytes."""
    _check_transfer_id(key.transfer_id)
    return types_pb2.TransferKey(transfer_id=key.transfer_id, attempt=key.attempt)


def key_from_wire(message: types_pb2.TransferKey) -> TransferKey:
    """Raises Malformed unless the transfer_id is 16 bytes."""
    _check_transfer_id(message.transfer_id)
    return TransferKey(message.transfer_id, message.attempt)


def _check_transfer_id(transfer_id: bytes) -> None:
    if len(transfer_id) != TRANSFER_ID_BYTES:
        raise Malformed(f"transfer_id is {len(transfer_id)} bytes, not {TRANSFER_ID_BYTES}")


def fault_to_wire(fault: Fault) -> types_pb2.Fault:
    """A fault as a message."""
    return types_pb2.Fault(reason=types_pb2.Reason.ValueType(fault.reason), detail=fault.detail)


def fault_from_wire(message: types_pb2.Fault) -> Fault:
    """A reason that this version does not know becomes UNSPECIFIED, its number kept in the detail."""
    try:
        return Fault(Reason(message.reason), message.detail)
    except ValueError:
        return Fault(Reason.UNSPECIFIED, f"reason {message.reason}: {message.detail}")


def counts_to_wire(counts: Counts) -> types_pb2.TransferCounts:
    """Counts as a message."""
    return types_pb2.TransferCounts(
        bytes=counts.bytes,
        chunks=counts.chunks,
        chunks_before_seal=counts.chunks_before_seal,
        runs=counts.runs,
    )


def counts_from_wire(message: types_pb2.TransferCounts) -> Counts:
    """Counts from a message."""
    return Counts(message.bytes, message.chunks, message.chunks_before_seal, message.runs)


def blocks_to_wire(blocks: Blocks) -> types_pb2.Blocks:
    """Blocks of one group as a message."""
    return types_pb2.Blocks(group=blocks.group, start=blocks.start, block_ids=blocks.ids)


def blocks_from_wire(message: types_pb2.Blocks) -> Blocks:
    """Blocks of one group, ids as a tuple."""
    return Blocks(message.group, message.start, tuple(message.block_ids))


def layout_to_wire(layout: Layout) -> types_pb2.Layout:
    """A layout as a message."""
    return types_pb2.Layout(
        pool_bytes=layout.pool_bytes,
        blocks=layout.blocks,
        groups=[types_pb2.Group(block_size=g.block_size, kind=_KINDS[g.kind]) for g in layout.groups],
        layers=[_layer_to_wire(layer) for layer in layout.layers],
        replica=layout.replica,
        replicas=layout.replicas,
    )


def _layer_to_wire(layer: Layer) -> types_pb2.Layer:
    return types_pb2.Layer(
        name=layer.name,
        group=layer.group,
        first_head=layer.first_head,
        heads=layer.heads,
        total_heads=layer.total_heads,
        planes=[
            types_pb2.Plane(
                offset=p.offset,
                block_stride=p.block_stride,
                head_stride=p.head_stride,
                token_stride=p.token_stride,
                cell_bytes=p.cell_bytes,
            )
            for p in layer.planes
        ],
        opaque=layer.opaque,
    )


def layout_from_wire(message: types_pb2.Layout) -> Layout:
    """A layout from a message. Raises Malformed where a group's kind is not said, or unknown."""
    return Layout(
        pool_bytes=message.pool_bytes,
        blocks=message.blocks,
        groups=tuple(Group(g.block_size, _kind_from_wire(i, g.kind)) for i, g in enumerate(message.groups)),
        layers=tuple(_layer_from_wire(layer) for layer in message.layers),
        replica=message.replica,
        replicas=message.replicas,
    )


def _kind_from_wire(index: int, kind: types_pb2.GroupKind.ValueType) -> GroupKind:
    try:
        return _KINDS_BACK[kind]
    except KeyError:
        raise Malformed(f"groups[{index}].kind is {kind}, not one of {sorted(_KINDS_BACK)}") from None


def _layer_from_wire(layer: types_pb2.Layer) -> Layer:
    return Layer(
        name=layer.name,
        group=layer.group,
        first_head=layer.first_head,
        heads=layer.heads,
        total_heads=layer.total_heads,
        planes=tuple(
            Plane(p.offset, p.block_stride, p.head_stride, p.token_stride, p.cell_bytes) for p in layer.planes
        ),
        opaque=layer.opaque,
    )


def side_to_wire(side: Side) -> engine_pb2.Side.ValueType:
    """A side as a number."""
    return _SIDES[side]


def side_from_wire(side: engine_pb2.Side.ValueType) -> Side:
    """Raises Malformed where the side is not said, or unknown."""
    try:
        return _SIDES_BACK[side]
    except KeyError:
        raise Malformed(f"side is {side}, not one of {sorted(_SIDES_BACK)}") from None


def lease_to_wire(lease: float | None) -> int:
    """Seconds to milliseconds, at least 1: 0 stands for None, the daemon's own lease.

    Raises Malformed where that is no number of seconds, or too many.
    """
    if lease is None:
        return 0
    if not lease <= MAX_LEASE:  # also where it is not a number
        raise Malformed(f"lease is {lease} s, not at most {MAX_LEASE}")
    return max(1, round(max(lease, 0.0) * 1000))


def lease_from_wire(lease_ms: int) -> float | None:
    """Milliseconds to seconds; 0 is None, the daemon's own lease."""
    return lease_ms / 1000 if lease_ms else None


def within(name: str, value: int, low: int, high: int) -> int:
    """The value. Raises Malformed unless it is from `low` to `high`, both included."""
    if not low <= value <= high:
        raise Malformed(f"{name} is {value}, not from {low} to {high}")
    return value


def text(name: str, value: str, *, empty: bool = True) -> str:
    """The value. Raises Malformed where it is longer than MAX_TEXT, or empty and may not be."""
    if len(value) > MAX_TEXT:
        raise Malformed(f"{name} has {len(value)} characters; at most {MAX_TEXT} are allowed")
    if not value and not empty:
        raise Malformed(f"{name} is empty")
    return value


def digest(name: str, value: bytes) -> bytes:
    """The value. Raises Malformed where it is longer than MAX_DIGEST."""
    within(f"length of {name}", len(value), 0, MAX_DIGEST)
    return value


def brief(value: str) -> str:
    """As much of a text for people as a message takes: cut, and what is no text in it replaced.

    Raises TypeError where it is no text at all.
    """
    return value[:MAX_TEXT].encode("utf-8", "replace").decode()
