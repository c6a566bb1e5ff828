# SPDX-License-Identifier: Apache-2.0
"""The shared values to and from `kvpush.v1` messages (types.proto).

Reading checks only what a message can be wrong in by itself, and raises Malformed; whether a layout's
addresses lie in its pool is for whoever computes addresses.
"""

from __future__ import annotations

from kvpush_client._proto import types_pb2
from kvpush_client.events import Counts, Fault, Reason, TransferKey
from kvpush_client.layout import Blocks, Group, GroupKind, Layer, Layout, Plane

TRANSFER_ID_BYTES = 16

_KINDS = {
    GroupKind.FULL: types_pb2.GROUP_KIND_FULL,
    GroupKind.SLIDING_WINDOW: types_pb2.GROUP_KIND_SLIDING_WINDOW,
    GroupKind.STATE: types_pb2.GROUP_KIND_STATE,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


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
