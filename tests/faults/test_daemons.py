# SPDX-License-Identifier: Apache-2.0
"""Every message between real daemons, their movers and their engines, and every NIXL call, with every fault.

The cases are the catalog's. Whatever goes wrong, each half ends once, with a reason, within its lease; nothing
is left; and the engines that come next find that all works.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvpush_client.events import Reason
from testing.faults import catalog
from testing.faults.rules import Act, Rule
from tests.faults.story import Ends, Pair

pytestmark = pytest.mark.nixl

ACTS = (Act.DROP, Act.DELAY, Act.REPEAT, Act.FAIL, Act.HANG)

LANDED: Ends = (None, None)
CANCELLED: Ends = (Reason.CANCELLED, Reason.PEER_CANCELLED)


@dataclass(frozen=True)
class Case:
    """A fault at a point."""

    point: catalog.Point
    act: Act

    @property
    def name(self) -> str:
        return f"{self.point.name} of the {self.point.process}: {self.act}"


CASES = [
    Case(point, act)
    for point in catalog.points()
    for act in ACTS
    if point.allows("before", act)
    and (".send." in point.name or point.name.startswith("nixl."))
    and not point.name.startswith(("fds.", "admin."))
]


def brief(index: int, case: Case) -> bool:
    """One fault of each point, another one at each: what the default run has time for."""
    return ACTS[index % len(ACTS)] is case.act


def parameters() -> list[object]:
    order = {point: index for index, point in enumerate(dict.fromkeys(case.point for case in CASES))}
    return [
        pytest.param(case, id=case.name, marks=() if brief(order[case.point], case) else pytest.mark.long)
        for case in CASES
    ]
