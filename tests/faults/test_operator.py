# SPDX-License-Identifier: Apache-2.0
"""Every question and every answer of the operator's, with every fault: the operator is told, and nobody else
notices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kvpushctl import admin
from kvpushctl.errors import DaemonUnreachable
from testing.faults import catalog
from testing.faults.rules import Act, Rule
from testing.node import Node
from tests.daemon.daemon_kit import eventually
from tests.faults.story import Pair

pytestmark = pytest.mark.nixl

ASK: dict[str, Callable[[admin.Admin], object]] = {
    "GetStatus": lambda daemon: daemon.status().node,
    "ListEngines": lambda daemon: daemon.engines(),
    "ListReservations": lambda daemon: daemon.reservations(),
    "ListHandoffs": lambda daemon: daemon.handoffs(),
    "ListTransfers": lambda daemon: daemon.transfers(live_only=True),
    "ListPeers": lambda daemon: [peer.node for peer in daemon.peers()],
    "Drain": lambda daemon: daemon.drain().handoffs,
}
"""How kvpushctl asks each."""


@dataclass(frozen=True)
class Case:
    """A fault at a point."""

    point: str
    act: Act

    @property
    def method(self) -> str:
        return self.point.rpartition(".")[2]

    @property
    def is_brief(self) -> bool:
        """What the default run has time for. kvpushctl waits 5 s for an answer."""
        return (self.point, self.act) in {
            ("admin.recv.GetStatus", Act.DROP),
            ("admin.send.GetStatus", Act.FAIL),
            ("admin.send.Drain", Act.DROP),
            ("admin.send.ListTransfers", Act.DELAY),
            ("admin.recv.ListPeers", Act.HANG),
        }


CASES = [
    Case(point.name, act)
    for point in catalog.points()
    for act in (Act.DROP, Act.DELAY, Act.FAIL, Act.HANG)
    if point.name.startswith("admin.") and point.allows("before", act)
]


def ask(node: Node, method: str) -> object:
    with admin.connect(node.runtime_dir) as daemon:
        return ASK[method](daemon)


def test_all_that_an_operator_can_ask_has_a_row() -> None:
    assert {case.method for case in CASES} == set(ASK) == set(catalog.admin_methods())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.point}: {case.act}", marks=() if case.is_brief else pytest.mark.long)
        for case in CASES
    ],
)
def test_the_operator_is_told_and_can_ask_again_and_transfers_go_on(pair: Pair, case: Case) -> None:
    rule = Rule(case.point, case.act, seconds=0.2, node="p")
    pair.board.set([rule])
    with ThreadPoolExecutor(1) as operator:
        answer = operator.submit(ask, pair.p, case.method)
        eventually(lambda: pair.struck(rule))
        if case.method != "Drain":
            pair.works(rule)
        if case.act is Act.DELAY:
            answer.result()
        else:
            with pytest.raises(DaemonUnreachable, match="no answer" if case.act is Act.HANG else "nobody"):
                answer.result()
    pair.board.clear()
    if case.method == "Drain":
        # Who was not told may have been heard.
        assert pair.p.status().draining is (".send." in case.point or case.act is Act.DELAY)
    ask(pair.p, case.method)
    if case.method == "Drain":
        assert pair.p.status().draining
        pair.p.stop()
        pair.p.start()
        pair.works(rule)
