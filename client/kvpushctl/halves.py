# SPDX-License-Identifier: Apache-2.0
"""One side's part of a transfer, as a record and as a line."""

from __future__ import annotations

from kvpush_client._proto import admin_pb2
from kvpushctl.printer import Column, Record, field
from kvpushctl.units import count, duration_ms


def phase(value: int) -> str:
    """`open`, `matched`, `moving`, `fencing` or `ended`; a number where the daemon is newer than this."""
    names: dict[int, str] = {number: name for name, number in admin_pb2.Phase.items()}
    return names.get(value, str(value)).removeprefix("PHASE_").lower()


def half(one: admin_pb2.Half) -> Record:
    """A half as a record. `end` is null until the transfer is sealed."""
    return {
        "transfer_id": one.transfer_id,
        "attempt": one.attempt,
        "engine_id": one.engine_id,
        "other": one.other,
        "phase": phase(one.phase),
        "age_ms": one.age_ms,
        "lease_left_ms": one.lease_left_ms or None,
        "blocks": one.blocks,
        "start": one.start,
        "end": one.end or None,
        "label": one.label,
    }


def positions(record: Record) -> str:
    """The token positions of a half: `[0, 2999)`, or `[0, ...)` until the end is known."""
    return f"[{record['start']}, {'...' if record['end'] is None else record['end']})"


COLUMNS: tuple[Column, ...] = (
    field("TRANSFER", "transfer_id"),
    field("TRY", "attempt", right=True),
    field("ENGINE", "engine_id"),
    field("OTHER SIDE", "other"),
    field("PHASE", "phase"),
    field("AGE", "age_ms", duration_ms, right=True),
    field("LEASE LEFT", "lease_left_ms", duration_ms, right=True),
    field("BLOCKS", "blocks", count, right=True),
    Column("POSITIONS", positions),
    field("REQUEST", "label"),
)
