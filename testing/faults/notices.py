# SPDX-License-Identifier: Apache-2.0
"""Faults at what two agents tell each other beside the bytes."""

from __future__ import annotations

from typing import Any

from kvpushd.mover.transport.agents import Agents
from kvpushd.mover.transport.notices import Notice
from testing.faults.parts import same
from testing.faults.points import Broken, Lane, Points

LINK = "notice"

Heard = tuple[str, Notice]


class FaultyAgents(Agents):
    """Agents whose notices pass the points "notice.send.*" and "notice.recv.*". A bell that comes with its
    parcel passes the second alone."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points

    def tell(self, agent: Any, name: str, notice: Notice) -> None:
        """As the inner one; where it breaks, as NIXL fails."""
        rule = self._points.strikes(f"{LINK}.send.{type(notice).__name__}", "before")
        try:
            if rule is not None:
                self._points.suffer(rule)
        except Broken as error:
            raise self.errors[0](str(error)) from error
        for passed in Lane[Notice]().passes(notice, rule, same):
            super().tell(agent, name, passed)

    def heard(self, agent: Any) -> list[Heard]:
        """As the inner one."""
        passed: list[Heard] = []
        for came in super().heard(agent):
            rule = self._points.strikes(f"{LINK}.recv.{type(came[1]).__name__}", "before")
            if rule is not None:
                self._points.suffer(rule)
            passed.extend(Lane[Heard]().passes(came, rule, same))
        return passed
