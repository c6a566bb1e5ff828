# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl reservations`: the receiver halves that hold blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.halves import COLUMNS, half
from kvpushctl.printer import Output


def reservations(
    engine: Annotated[str, typer.Option(help="Only those of this engine.", show_default=False)] = "",
    output: OutputOption = Output.TABLE,
    runtime: RuntimeDirOption = None,
) -> None:
    """Blocks that engines here hold open to receive into, oldest first."""
    with connect(runtime_dir(runtime)) as admin:
        records = [half(one) for one in admin.reservations(engine)]
    printer(output).rows("reservations", records, COLUMNS, "nothing is reserved")
