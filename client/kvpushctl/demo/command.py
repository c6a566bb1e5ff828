# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl demo`: a whole fleet on this host, compared with a plain engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpushctl.context import OutputOption, printer
from kvpushctl.demo.progress import Progress
from kvpushctl.demo.report import show
from kvpushctl.demo.run import run
from kvpushctl.printer import Output


def demo(
    corrupt: Annotated[
        bool,
        typer.Option("--corrupt", help="Spoil KV on its way: outputs must differ, and the exit status be 1."),
    ] = False,
    logs: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Keep what the processes write in this folder.", show_default=False
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Prefill and decode on this host through two daemons, compared with a plain engine.

    Exit status 0 only if every output is token for token the plain engine's, and every position that the
    decode engine lacked was received.
    """
    out = printer(output)
    report = run(Progress(out.progress), corrupt=corrupt, logs=logs)
    show(report, out)
    if report.failures():
        raise typer.Exit(1)
