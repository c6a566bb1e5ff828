# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl status`: one look at the node."""

from __future__ import annotations

import time

from kvpush_client._proto import admin_pb2
from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.printer import Column, Output, Record, field
from kvpushctl.units import count, duration_ms, size, yes

MOVERS: tuple[Column, ...] = (
    field("MOVER", "name"),
    field("PID", "pid", right=True),
    field("ALIVE", "alive", yes),
    field("RESTARTS", "restarts", right=True),
    field("POOLS", "pools", right=True),
    field("INLETS", "inlets", right=True),
    field("OUTLETS", "outlets", right=True),
    field("TRANSFERS", "transfers", right=True),
    field("REGISTRATIONS", "registrations", right=True),
    field("TRANSPORTS", "transports", ", ".join),
)


def status(output: OutputOption = Output.TABLE, runtime: RuntimeDirOption = None) -> None:
    """One look at the node: ready or not, what is held, what has moved."""
    with connect(runtime_dir(runtime)) as admin:
        answer = admin.status()
    record = node(answer)
    out = printer(output)
    out.facts(record, lines(answer, time.time_ns()))
    if output is Output.TABLE and answer.movers:
        out.print(out.table(record["movers"], MOVERS))


def held(of: admin_pb2.Held) -> Record:
    """Counts of what is held now."""
    return {
        "engines": of.engines,
        "pools": of.pools,
        "pool_bytes": of.pool_bytes,
        "reservations": of.reservations,
        "handoffs": of.handoffs,
        "quarantined_blocks": of.quarantined_blocks,
        "links": of.links,
        "writes": of.writes,
    }


def node(answer: admin_pb2.GetStatusResponse) -> Record:
    """A node as a record."""
    return {
        "node": answer.node,
        "software": answer.software,
        "started_unix_ns": answer.started_unix_ns,
        "ready": answer.ready,
        "draining": answer.draining,
        "problems": list(answer.problems),
        "peer_address": answer.peer_address,
        "peer_security": answer.peer_security,
        "held": held(answer.held),
        "totals": {
            "sent_bytes": answer.totals.bytes_sent,
            "received_bytes": answer.totals.bytes_received,
            "landed": answer.totals.landed,
            "failed": answer.totals.failed,
        },
        "movers": [
            {
                "name": mover.name,
                "pid": mover.pid,
                "alive": mover.alive,
                "restarts": mover.restarts,
                "pools": mover.pools,
                "inlets": mover.inlets,
                "outlets": mover.outlets,
                "transfers": mover.transfers,
                "registrations": mover.registrations,
                "counted_unix_ns": mover.counted_unix_ns,
                "transports": list(mover.transports),
            }
            for mover in sorted(answer.movers, key=lambda mover: mover.name)
        ],
    }


def lines(answer: admin_pb2.GetStatusResponse, now_unix_ns: int) -> list[tuple[str, str]]:
    """A node as lines of title and text."""
    state = "draining" if answer.draining else "ready" if answer.ready else "not ready"
    up = duration_ms(max(0, now_unix_ns - answer.started_unix_ns) / 1e6) if answer.started_unix_ns else "-"
    have, total = answer.held, answer.totals
    return [
        ("node", answer.node),
        ("state", state),
        *(("problem", problem) for problem in answer.problems),
        ("version", answer.software),
        ("up", up),
        ("peers at", f"{answer.peer_address} ({answer.peer_security})"),
        ("engines", count(have.engines)),
        ("pools", f"{count(have.pools)}, {size(have.pool_bytes)}"),
        ("reservations", count(have.reservations)),
        ("handoffs", count(have.handoffs)),
        ("quarantined", f"{count(have.quarantined_blocks)} blocks"),
        ("links", count(have.links)),
        ("writes", f"{count(have.writes)} in flight"),
        ("sent", size(total.bytes_sent)),
        ("received", size(total.bytes_received)),
        ("landed", count(total.landed)),
        ("failed", count(total.failed)),
    ]
