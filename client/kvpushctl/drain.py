# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl drain`: no new work, let running work end."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvpush_client._proto import admin_pb2
from kvpushctl.admin import Admin, connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.errors import CommandError
from kvpushctl.printer import Output
from kvpushctl.status import held
from kvpushctl.units import count

POLL_SECONDS = 0.2


def drain(
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Wait so long for running work to end.")
    ] = 0,
    output: OutputOption = Output.TABLE,
    runtime: RuntimeDirOption = None,
) -> None:
    """Refuse new work, let running work end, and say how much is left.

    With --wait the exit status is 1 if work is left when the time is over.
    """
    with connect(runtime_dir(runtime)) as admin:
        left = _until_idle(admin, time.monotonic() + wait)
    printer(output).facts(
        {"draining": True, "idle": not work(left), "held": held(left)},
        [
            ("draining", "yes"),
            ("reservations", count(left.reservations)),
            ("handoffs", count(left.handoffs)),
            ("writes", count(left.writes)),
            ("quarantined", f"{count(left.quarantined_blocks)} blocks"),
        ],
    )
    if wait and work(left):
        raise CommandError(f"work is left after {wait:g} s: kvpushctl transfers --live shows it")


def work(left: admin_pb2.Held) -> int:
    """What keeps a node from being idle: halves, writes, blocks in quarantine."""
    return left.reservations + left.handoffs + left.writes + left.quarantined_blocks


def _until_idle(admin: Admin, deadline: float) -> admin_pb2.Held:
    while True:
        left = admin.drain()
        remaining = deadline - time.monotonic()
        if not work(left) or remaining <= 0:
            return left
        time.sleep(min(POLL_SECONDS, remaining))
