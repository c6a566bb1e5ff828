# SPDX-License-Identifier: Apache-2.0
"""One number for the bytes of many runs, in their order."""

from __future__ import annotations

import zlib

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Int64s, Runs
from kvpushd.memory.host import Bytes


def checksum(pool: Bytes, offsets: Int64s, lengths: Int64s) -> int:
    """CRC-32 of the runs of a pool, one after another. 3 GB/s in long runs, 2 at 4 KiB."""
    view = pool.data
    found = 0
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        found = zlib.crc32(view[offset : offset + length], found)
    return found


def differs(runs: Runs) -> Fault:
    """What is said where the sums of both sides are not the same."""
    first, end = int(runs.target.min()), int((runs.target + runs.length).max())
    size = int(runs.length.sum())
    detail = f"{size:,} bytes at {first:,} to {end:,} of the receiver's pool are not what was sent"
    return Fault(Reason.CORRUPTED, detail)
