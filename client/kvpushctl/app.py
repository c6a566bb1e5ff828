# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from kvpushctl.demo.command import demo
from kvpushctl.doctor import doctor
from kvpushctl.drain import drain
from kvpushctl.engines import engines
from kvpushctl.handoffs import handoffs
from kvpushctl.peers import peers
from kvpushctl.reservations import reservations
from kvpushctl.status import status
from kvpushctl.transfers import transfers
from kvpushctl.version import version

COMMANDS: tuple[Callable[..., Any], ...] = (
    status,
    engines,
    reservations,
    handoffs,
    transfers,
    peers,
    drain,
    doctor,
    demo,
    version,
)


def build() -> typer.Typer:
    """The commands, in the order in which help lists them."""
    app = typer.Typer(
        name="kvpushctl",
        help="See and steer the KV traffic of this node. "
        "Exit status: 0 ok, 1 failed, 2 wrong usage, 3 no daemon answers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in COMMANDS:
        app.command()(command)
    return app
