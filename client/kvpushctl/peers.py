# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl peers`: the links to other nodes."""

from __future__ import annotations

from kvpush_client._proto import admin_pb2
from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.printer import Column, Output, Record, field
from kvpushctl.units import count, size


def rate(one: Record) -> str:
    """What a link carries while it is busy, and whether that is too little."""
    if one["bytes_per_second"] is None:
        return "-"
    return f"{size(one['bytes_per_second'])}/s{' BELOW FLOOR' if one['below_floor'] else ''}"


COLUMNS: tuple[Column, ...] = (
    field("ADDRESS", "address"),
    field("NODE", "node"),
    field("DIRECTION", "direction"),
    field("LINK", "up", lambda up: "up" if up else "down"),
    field("TRANSPORT", "transport"),
    field("MOVED", "moved_bytes", size, right=True),
    Column("RATE", rate, right=True),
    field("IN FLIGHT", "transfers", count, right=True),
    field("VERSION", "software"),
    field("LAST FAULT", "last_fault"),
)


def peers(output: OutputOption = Output.TABLE, runtime: RuntimeDirOption = None) -> None:
    """Links to other nodes, by address: up or down, bytes, rate; transports are of all together."""
    with connect(runtime_dir(runtime)) as admin:
        records = [peer(one) for one in admin.peers()]
    records.sort(key=lambda one: (str(one["address"]), str(one["direction"])))
    printer(output).rows("peers", records, COLUMNS, "no other node is linked")


def peer(one: admin_pb2.Peer) -> Record:
    """A link as a record. This node receives over the links that it dialed."""
    return {
        "address": one.address,
        "node": one.node,
        "direction": "receiving" if one.receiving else "sending",
        "up": one.up,
        "transport": one.transport,
        "moved_bytes": one.bytes,
        "bytes_per_second": one.bytes_per_second or None,
        "below_floor": one.below_floor,
        "transfers": one.transfers,
        "last_fault": one.last_fault or None,
        "software": one.software,
    }
