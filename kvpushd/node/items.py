# SPDX-License-Identifier: Apache-2.0
"""What an engine's process says, as events of the ledger."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpush_client.items import Advance, Cancel, Decline, Handoff, Reserve, Sender
from kvpush_client.layout import Blocks as WireBlocks
from kvpushd.core.events import Advanced, Cancelled, Declined, HandedOff, Reserved
from kvpushd.core.layout import Blocks
from kvpushd.core.words import SECOND, Incarnation, SenderAddress
from kvpushd.node.hub import now

Said = Advance | Cancel | Decline | Handoff | Reserve


def event_of(
    item: Said, incarnation: Incarnation, rank: int, address: Callable[[Sender], SenderAddress]
) -> Advanced | Cancelled | Declined | HandedOff | Reserved:
    """The item of the process of a rank; `address` says on which link a sender is reached."""
    match item:
        case Advance():
            # An engine's clock is this node's; what it says of the future is still no reason to believe it.
            at = min(item.at, now()) if item.at else now()
            first, end = item.first_layer, item.end_layer
            return Advanced(incarnation, rank, item.key, item.positions, at, first, end)
        case Reserve():
            return Reserved(
                incarnation,
                item.key,
                tuple(address(sender) for sender in item.senders),
                item.start,
                item.end,
                _blocks(item.blocks),
                _nanoseconds(item.lease),
                item.priority,
                item.label,
                item.prompt,
            )
        case Handoff():
            return HandedOff(
                incarnation,
                item.key,
                _blocks(item.blocks),
                item.seal,
                _nanoseconds(item.lease),
                item.receiver_engine_id,
                item.label,
                {prompt.end: prompt.digest for prompt in item.prompts},
            )
        case Cancel():
            return Cancelled(incarnation, item.key, item.side, item.detail)
        case Decline():
            return Declined(incarnation, item.key, tuple(address(sender) for sender in item.senders))


def _blocks(lists: tuple[WireBlocks, ...]) -> tuple[Blocks, ...]:
    return tuple(Blocks(b.group, b.start, np.asarray(b.ids, np.int64)) for b in lists)


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * SECOND)
