# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl engines`: who has a session here."""

from __future__ import annotations

import time

from kvpush_client._proto import admin_pb2
from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.printer import Column, Output, Record, field
from kvpushctl.units import count, duration_ms, size

COLUMNS: tuple[Column, ...] = (
    field("ENGINE", "engine_id"),
    Column("RANKS", lambda one: f"{one['ranks_ready']}/{one['local_ranks']} of {one['world_size']}"),
    field("POOL", "pool_bytes", size, right=True),
    field("MEMORY", "memory"),
    field("BLOCKS", "blocks", count, right=True),
    field("HELD", "held_blocks", count, right=True),
    field("RESERVATIONS", "reservations", count, right=True),
    field("HANDOFFS", "handoffs", count, right=True),
    Column("HERE FOR", lambda one: _age(one["since_unix_ns"]), right=True),
    field("SOFTWARE", "software"),
)


def engines(output: OutputOption = Output.TABLE, runtime: RuntimeDirOption = None) -> None:
    """Engines that have a session with this node, by id."""
    with connect(runtime_dir(runtime)) as admin:
        records = sorted((engine(one) for one in admin.engines()), key=lambda one: str(one["engine_id"]))
    printer(output).rows("engines", records, COLUMNS, "no engine has a session here")


def engine(one: admin_pb2.Engine) -> Record:
    """An engine as a record."""
    return {
        "engine_id": one.engine_id,
        "incarnation": one.incarnation,
        "ranks_ready": one.ranks_ready,
        "local_ranks": one.local_ranks,
        "world_size": one.world_size,
        "pool_bytes": one.pool_bytes,
        "blocks": one.blocks,
        "held_blocks": one.held_blocks,
        "reservations": one.reservations,
        "handoffs": one.handoffs,
        "memory": one.memory,
        "software": one.software,
        "since_unix_ns": one.since_unix_ns,
        "fingerprint": dict(sorted(one.fingerprint.fields.items())),
    }


def _age(since_unix_ns: int) -> str:
    return duration_ms(max(0, time.time_ns() - since_unix_ns) / 1e6) if since_unix_ns else "-"
