# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl transfers`: what is in flight, what ended last, and one transfer's timeline."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvpush_client._proto import admin_pb2, types_pb2
from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.errors import CommandError
from kvpushctl.halves import half, positions
from kvpushctl.printer import Column, Output, Printer, Record, field
from kvpushctl.timeline import since_ms, timeline, times
from kvpushctl.units import count, duration_ms, size


def _since(name: str) -> Column:
    title = name.replace("_", " ").upper()
    return Column(title, lambda one: duration_ms(one["phases_ms"].get(name)), right=True)


COLUMNS: tuple[Column, ...] = (
    field("TRANSFER", "transfer_id"),
    field("TRY", "attempt", right=True),
    field("SIDE", "side"),
    field("ENGINE", "engine_id"),
    field("OTHER SIDE", "other"),
    field("PHASE", "phase"),
    field("AGE", "age_ms", duration_ms, right=True),
    field("BYTES", "bytes", size, right=True),
    Column("CHUNKS", lambda one: f"{one['chunks_before_seal']}+{one['chunks'] - one['chunks_before_seal']}"),
    _since("announce"),
    _since("first_byte"),
    _since("seal"),
    _since("landed"),
    _since("first_token"),
    Column("FAULT", lambda one: one["fault"]["reason"] if one["fault"] else "-"),
)

MOMENTS: tuple[Column, ...] = (
    Column("AFTER", lambda one: f"{one['after_ms']:.3f} ms", right=True),
    field("MOMENT", "name"),
    field("CLOCK", "clock"),
    field("MEANING", "meaning"),
)


def transfers(
    transfer_id: Annotated[
        str, typer.Argument(metavar="ID", help="Show one transfer's timeline.", show_default=False)
    ] = "",
    live: Annotated[bool, typer.Option("--live", help="Leave out those that ended.")] = False,
    output: OutputOption = Output.TABLE,
    runtime: RuntimeDirOption = None,
) -> None:
    """Transfers in flight, oldest first, then those that ended, newest first; times since the half began."""
    if transfer_id and not re.fullmatch("[0-9a-fA-F]{32}", transfer_id):
        raise typer.BadParameter("a transfer id has 32 hex digits", param_hint="ID")
    with connect(runtime_dir(runtime)) as admin:
        found = [transfer(one) for one in admin.transfers(transfer_id.lower(), live_only=live)]
    # Live first; within that the daemon's order.
    found.sort(key=lambda one: one["phase"] == "ended")
    out = printer(output)
    if not transfer_id:
        out.rows("transfers", found, COLUMNS, "no transfer is known")
        return
    if not found:
        raise CommandError(f"no transfer {transfer_id} is known here: it went elsewhere, or was forgotten")
    if output is Output.JSON:
        out.document({"transfers": found})
        return
    for one in found:
        _show(out, one)


def transfer(one: admin_pb2.Transfer) -> Record:
    """A transfer as a record. `phases_ms` counts from the first moment that this node knows of it."""
    moments = timeline(one)
    start = moments[0].at_unix_ns if moments else 0
    return {
        **half(one.half),
        "side": "sending" if one.sending else "receiving",
        "bytes": one.counts.bytes,
        "chunks": one.counts.chunks,
        "chunks_before_seal": one.counts.chunks_before_seal,
        "runs": one.counts.runs,
        "phases_ms": {moment.name: since_ms(moment.at_unix_ns, start) for moment in moments},
        "timeline": [
            {
                "name": moment.name,
                "at_unix_ns": moment.at_unix_ns,
                "after_ms": since_ms(moment.at_unix_ns, start),
                "clock": moment.clock,
                "meaning": moment.meaning,
            }
            for moment in moments
        ],
        "times": times(one.times),
        "sender_times": times(one.sender_times),
        "first_token_unix_ns": one.first_token_unix_ns or None,
        "fault": _fault(one.fault) if one.HasField("fault") else None,
    }


def _fault(fault: types_pb2.Fault) -> Record:
    names: dict[int, str] = {number: name for name, number in types_pb2.Reason.items()}
    reason = names.get(fault.reason, str(fault.reason)).removeprefix("REASON_").lower()
    return {"reason": reason, "detail": fault.detail}


def _show(out: Printer, one: Record) -> None:
    fault = one["fault"]
    out.facts(
        one,
        [
            ("transfer", f"{one['transfer_id']}, attempt {one['attempt']}, {one['side']}"),
            ("engine", f"{one['engine_id']}, request {one['label'] or '-'}"),
            ("other side", one["other"] or "-"),
            ("phase", one["phase"]),
            ("positions", f"{positions(one)} in {count(one['blocks'])} blocks"),
            (
                "moved",
                f"{size(one['bytes'])} in {count(one['chunks'])} chunks ({count(one['runs'])} runs), "
                f"{count(one['chunks_before_seal'])} before the seal",
            ),
            ("fault", f"{fault['reason']}: {fault['detail']}" if fault else "-"),
        ],
    )
    out.print(out.table(one["timeline"], MOMENTS))
