# SPDX-License-Identifier: Apache-2.0
"""Whoever may be hit, by the name that the stage has for it."""

from __future__ import annotations

from collections.abc import Mapping

from testing.chaos.scenario import Whom
from testing.chaos.stage import RANKS, D, P

ROUTER = "router"


def mover_of(node: str) -> str:
    """The name of a node's mover."""
    return f"mover {node}"


NAMES: Mapping[Whom, str] = {
    Whom.P_ENGINE: P,
    Whom.D_ENGINE: D,
    Whom.FIRST_RANK: RANKS,
    Whom.LAST_RANK: RANKS,
    Whom.P_DAEMON: "p",
    Whom.D_DAEMON: "d",
    Whom.P_MOVER: mover_of("p"),
    Whom.D_MOVER: mover_of("d"),
    Whom.ROUTER: ROUTER,
}
"""An engine's name, that of a rank's engine, a node's for its daemon, and so on."""
PROCESSES: Mapping[tuple[str, str], str] = {
    ("client", "p"): P,
    ("client", "d"): D,
    **{("daemon", node): node for node in "pd"},
    **{("mover", node): mover_of(node) for node in "pd"},
}
"""The same for a process as fault points name it, with its node."""
