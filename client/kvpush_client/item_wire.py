# SPDX-License-Identifier: Apache-2.0
"""Items of a session to and from `kvpush.v1` messages (engine.proto)."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import fields

from kvpush_client import wire
from kvpush_client._proto import engine_pb2, types_pb2
from kvpush_client.events import Side, TransferKey
from kvpush_client.items import (
    Advance,
    Cancel,
    Decline,
    DescribePool,
    FirstToken,
    Handoff,
    Item,
    Prompt,
    Reserve,
    Sender,
)
from kvpush_client.layout import Blocks
from kvpush_client.wire import Malformed

MAX_SENDERS = 256
MAX_POSITION = (1 << 31) - 1
MAX_LAYER = (1 << 32) - 1
MAX_BLOCK_IDS = 1 << 20
"""Block ids in one item, over all groups."""
MAX_PROMPTS = 8
_MOST_LISTS = 1 << 16
"""Lists of blocks in one item."""
_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 60
_MOST_PRIORITY = (1 << 31) - 1  # requests may come with any number, and only its order counts


def item_to_wire(item: Item) -> engine_pb2.EngineItem:
    """Raises Malformed, and nothing else, where a value does not fit its field: it names the values."""
    try:
        return _item_to_wire(item)
    except Malformed as error:
        raise Malformed(f"{type(item).__name__}: {error}") from error
    except Exception as error:  # an engine may give any value, and each fails in its own way
        raise Malformed(f"{_shown(item)}: {error!r}") from error


def _shown(item: Item) -> str:
    """The item in a line that any message takes."""
    values = ", ".join(f"{each.name}={_repr.repr(getattr(item, each.name))}" for each in fields(item))
    return wire.brief(f"{type(item).__name__}({values})")


def _item_to_wire(item: Item) -> engine_pb2.EngineItem:
    pb = engine_pb2
    match item:
        case Advance():
            if item.end_layer is not None:  # 0 stands for None there, all layers
                wire.within("end_layer", item.end_layer, item.first_layer + 1, MAX_LAYER)
            return pb.EngineItem(
                advance=pb.Advance(
                    key=wire.key_to_wire(item.key),
                    first_layer=item.first_layer,
                    end_layer=item.end_layer or 0,
                    positions=item.positions,
                    final_monotonic_ns=item.at,
                )
            )
        case Handoff():
            if item.seal is not None:  # 0 stands for None there, not sealed
                wire.within("seal", item.seal, 1, MAX_POSITION)
            return pb.EngineItem(
                handoff=pb.Handoff(
                    key=wire.key_to_wire(item.key),
                    blocks=_blocks_to_wire(item.blocks),
                    seal=item.seal or 0,
                    lease_ms=wire.lease_to_wire(item.lease),
                    receiver_engine_id=wire.text("receiver_engine_id", item.receiver_engine_id),
                    label=wire.brief(item.label),
                    prompts=[pb.Prompt(end=p.end, digest=p.digest) for p in item.prompts],
                )
            )
        case Reserve():
            return pb.EngineItem(
                reserve=pb.Reserve(
                    key=wire.key_to_wire(item.key),
                    senders=_senders_to_wire(item.senders),
                    start=item.start,
                    end=item.end,
                    blocks=_blocks_to_wire(item.blocks),
                    lease_ms=wire.lease_to_wire(item.lease),
                    priority=max(-_MOST_PRIORITY, min(item.priority, _MOST_PRIORITY)),
                    label=wire.brief(item.label),
                    prompt=item.prompt,
                )
            )
        case Cancel():
            return pb.EngineItem(
                cancel=pb.Cancel(
                    key=wire.key_to_wire(item.key),
                    side=wire.side_to_wire(item.side),
                    detail=wire.brief(item.detail),
                )
            )
        case Decline():
            return pb.EngineItem(
                decline=pb.Decline(key=wire.key_to_wire(item.key), senders=_senders_to_wire(item.senders))
            )
        case FirstToken():
            return pb.EngineItem(
                first_token=pb.FirstToken(key=wire.key_to_wire(item.key), unix_ns=item.unix_ns)
            )
        case DescribePool():
            return pb.EngineItem(
                describe_pool=pb.DescribePool(pool_id=item.pool_id, layout=wire.layout_to_wire(item.layout))
            )


def item_from_wire(message: engine_pb2.EngineItem) -> Item:
    """Raises Malformed, naming the field, what it was and what was expected."""
    match message.WhichOneof("item"):
        case "advance":
            advance = message.advance
            return Advance(
                key=wire.key_from_wire(advance.key),
                positions=_position("positions", advance.positions),
                first_layer=advance.first_layer,
                end_layer=advance.end_layer or None,
                at=advance.final_monotonic_ns,
            )
        case "handoff":
            handoff = message.handoff
            return Handoff(
                key=wire.key_from_wire(handoff.key),
                blocks=_blocks_from_wire(handoff.blocks),
                seal=_position("seal", handoff.seal) or None,
                lease=wire.lease_from_wire(handoff.lease_ms),
                receiver_engine_id=wire.text("receiver_engine_id", handoff.receiver_engine_id),
                label=wire.text("label", handoff.label),
                prompts=_prompts_from_wire(handoff.prompts),
            )
        case "reserve":
            reserve = message.reserve
            if not reserve.start < _position("end", reserve.end):
                raise Malformed(f"positions [{reserve.start}, {reserve.end}) are empty")
            return Reserve(
                key=wire.key_from_wire(reserve.key),
                senders=_senders_from_wire(reserve.senders),
                start=reserve.start,
                end=reserve.end,
                blocks=_blocks_from_wire(reserve.blocks),
                lease=wire.lease_from_wire(reserve.lease_ms),
                priority=reserve.priority,
                label=wire.text("label", reserve.label),
                prompt=wire.digest("prompt", reserve.prompt),
            )
        case "cancel":
            cancel = message.cancel
            return Cancel(
                wire.key_from_wire(cancel.key),
                wire.side_from_wire(cancel.side),
                cancel.detail[: wire.MAX_TEXT],
            )
        case "decline":
            decline = message.decline
            return Decline(wire.key_from_wire(decline.key), _senders_from_wire(decline.senders))
        case "first_token":
            return FirstToken(wire.key_from_wire(message.first_token.key), message.first_token.unix_ns)
        case "describe_pool":
            describe = message.describe_pool
            return DescribePool(describe.pool_id, wire.layout_from_wire(describe.layout))
        case _:
            raise Malformed("the item is empty, or of a kind that this version does not know")


def instead_of(item: Item) -> Item | None:
    """What to say in place of an item that fits no message, so that what it speaks of ends. None for those
    that open or append: there is nothing, or it is cancelled."""
    match item:
        case Advance():  # no pool has that layer
            return Advance(item.key, 1, MAX_LAYER - 1, MAX_LAYER, 0)
        case Cancel():
            return Cancel(item.key, item.side, "")
        case _:
            return None


def half_of_message(message: engine_pb2.EngineItem) -> tuple[TransferKey, Side] | None:
    """The half that an item opens or appends to, though the item may be malformed.

    None for all other items, and where the key can't be read.
    """
    try:
        match message.WhichOneof("item"):
            case "reserve":
                return wire.key_from_wire(message.reserve.key), Side.RECEIVER
            case "handoff":
                return wire.key_from_wire(message.handoff.key), Side.SENDER
            case _:
                return None
    except Malformed:
        return None


def _blocks_to_wire(blocks: Sequence[Blocks]) -> list[types_pb2.Blocks]:
    wire.within("number of lists of blocks", len(blocks), 0, _MOST_LISTS)
    wire.within("number of block ids", sum(len(b.ids) for b in blocks), 0, MAX_BLOCK_IDS)
    return [wire.blocks_to_wire(b) for b in blocks]


def _blocks_from_wire(messages: Sequence[types_pb2.Blocks]) -> tuple[Blocks, ...]:
    wire.within("number of block ids", sum(len(b.block_ids) for b in messages), 0, MAX_BLOCK_IDS)
    return tuple(wire.blocks_from_wire(b) for b in messages)


def _senders_to_wire(senders: Sequence[Sender]) -> list[engine_pb2.SenderAddress]:
    wire.within("number of senders", len(senders), 0, MAX_SENDERS)
    return [
        engine_pb2.SenderAddress(
            engine_id=wire.text("senders.engine_id", s.engine_id),
            host=wire.text("senders.host", s.host),
            port=s.port,
        )
        for s in senders
    ]


def _senders_from_wire(senders: Iterable[engine_pb2.SenderAddress]) -> tuple[Sender, ...]:
    found = tuple(
        Sender(
            wire.text("senders.engine_id", s.engine_id, empty=False),
            wire.text("senders.host", s.host, empty=False),
            wire.within("senders.port", s.port, 1, 65535),
        )
        for s in senders
    )
    wire.within("number of senders", len(found), 1, MAX_SENDERS)
    return found


def _prompts_from_wire(messages: Sequence[engine_pb2.Prompt]) -> tuple[Prompt, ...]:
    wire.within("number of prompts", len(messages), 0, MAX_PROMPTS)
    return tuple(Prompt(_position("end", p.end), wire.digest("digest", p.digest)) for p in messages)


def _position(name: str, value: int) -> int:
    return wire.within(name, value, 0, MAX_POSITION)
