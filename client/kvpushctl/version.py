# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl version`: of this program, and of the daemon if one answers."""

from __future__ import annotations

from importlib.metadata import version as installed

from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.errors import CommandError
from kvpushctl.printer import Output


def version(output: OutputOption = Output.TABLE, runtime: RuntimeDirOption = None) -> None:
    """Versions of kvpushctl and, where one answers, of the daemon."""
    mine = installed("kvpushd")
    daemon: str | None = None
    out = printer(output)
    try:
        with connect(runtime_dir(runtime)) as admin:
            daemon = admin.status().software
    except CommandError as error:
        out.note(f"no daemon's version: {error}")
    out.facts({"kvpushctl": mine, "kvpushd": daemon}, [("kvpushctl", mine), ("kvpushd", daemon or "-")])
