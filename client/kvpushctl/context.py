# SPDX-License-Identifier: Apache-2.0
"""What every command can be told, and what it is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvpushctl.printer import Output, Printer
from kvpushctl.runtime import VARIABLE, default_runtime_dir

OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="Form of the data on stdout.", show_default=True)
]
RuntimeDirOption = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        envvar=VARIABLE,
        help="Where the daemon's sockets are. Default: /run/kvpushd, $XDG_RUNTIME_DIR/kvpushd, or in /tmp.",
        show_default=False,
        readable=False,  # it need not be: to enter it is enough, and who may not is told what to do
    ),
]


def printer(output: Output) -> Printer:
    """The printer of this process."""
    return Printer(output, sys.stdout, sys.stderr)


def runtime_dir(given: Path | None) -> Path:
    """The directory that was given, else the default."""
    return given if given is not None else default_runtime_dir(os.environ)
