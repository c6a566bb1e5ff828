# SPDX-License-Identifier: Apache-2.0
"""Block lists between a daemon and its mover: arrays of bytes, in place of a number per block."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpush_client._proto import mover_pb2
from kvpushd.core.layout import BlockLists, Blocks
from kvpushd.errors import Invalid

_ID = np.dtype("<i8")


def to_wire(lists: BlockLists) -> list[mover_pb2.BlockArray]:
    """Block lists as messages."""
    return [
        mover_pb2.BlockArray(group=b.group, start=b.start, ids=b.ids.astype(_ID, copy=False).tobytes())
        for b in lists
    ]


def from_wire(messages: Iterable[mover_pb2.BlockArray]) -> tuple[Blocks, ...]:
    """Block lists, not yet checked. Raises Invalid where the bytes are no whole number of ids."""
    lists = []
    for message in messages:
        if len(message.ids) % _ID.itemsize:
            raise Invalid(f"block ids are {_ID.itemsize} bytes each, and these are {len(message.ids)} bytes")
        lists.append(Blocks(message.group, message.start, np.frombuffer(message.ids, _ID)))
    return tuple(lists)
