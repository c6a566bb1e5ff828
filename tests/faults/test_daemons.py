# SPDX-License-Identifier: Apache-2.0
"""Every message between real daemons, their movers and their engines, and every NIXL call, with every fault.

The cases are the catalog's. Whatever goes wrong, each half ends once and with a reason; nothing is left; and
the engines that come next find that all works.
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

# How halves may end, beside as if nothing were, where something on this link is lost, fails or hangs: what
# was on it ends with it, and who waits for the other half, with its lease.
MOVERS = {
    Reason.MOVER_DIED,
    Reason.TRANSPORT_FAILED,
    Reason.PEER_UNREACHABLE,
    Reason.ENGINE_GONE,
    Reason.EXPIRED,
}
ENDS = {
    "peer": {Reason.PEER_UNREACHABLE, Reason.EXPIRED},
    # Who asks for an engine between its leaving and its coming back is told that there is none.
    "session": {Reason.PEER_UNREACHABLE, Reason.ENGINE_GONE, Reason.NO_SUCH_ENGINE, Reason.EXPIRED},
    "mover": MOVERS,
    # What a call that was not made should have opened is refused by name.
    "nixl": MOVERS | {Reason.INVALID},
    "local": MOVERS | {Reason.INVALID},
    "notice": MOVERS,
}
CANCELS = {None, Reason.CANCELLED, Reason.PEER_CANCELLED}


@dataclass(frozen=True)
class Case:
    """A fault at a point."""

    point: catalog.Point
    act: Act

    @property
    def name(self) -> str:
        return f"{self.point.name} of the {self.point.process}: {self.act}"

    @property
    def family(self) -> str:
        return self.point.name.partition(".")[0]

    @property
    def needs_talk(self) -> bool:
        """Whether only nodes come by whose agents talk."""
        return self.family == "notice" or self.point.name.endswith(".inspect")

    @property
    def is_harmless(self) -> bool:
        """Whether nothing may come of it."""
        if self.family == "notice":
            # What is not answered is said again. What a sender can't even say ends its write.
            fatal = (Act.HANG, Act.FAIL) if self.point.name.endswith(("Bell", "Inspect")) else (Act.HANG,)
            return self.act not in fatal
        # A second hello is no message that is said twice, but another one; and a mover that tells of a write
        # which is not under way is taken for one that is out of its mind.
        # And where a way is cut, something was wrong before.
        counts = self.point.name.endswith(("Hello", "WriteEnded"))
        if self.point.name.endswith("cut_outlet"):
            return False
        # A pool that could not be handed over is offered again, until it is.
        again = self.family == "fds"
        return again or self.act is Act.DELAY or (self.act is Act.REPEAT and not counts)


CASES = [
    Case(point, act)
    for point in catalog.points()
    for act in ACTS
    if point.name.startswith(
        ("peer.send.", "session.send.", "mover.send.", "nixl.", "local.", "fds.", "notice.")
    )
    and point.allows("before", act)
]


BRIEF: dict[str, set[tuple[str, Act]]] = {
    "nixl": set(),
    "local": {("local.register", Act.FAIL), ("local.post", Act.REPEAT), ("local.completion", Act.FAIL)},
    "notice": {
        ("notice.recv.Hello", Act.DROP),
        ("notice.send.Welcome", Act.FAIL),
        ("notice.recv.Bell", Act.DROP),
        ("notice.recv.Unpacked", Act.REPEAT),
        ("notice.send.Added", Act.DROP),
    },
    "fds": {("fds.recv.PoolOffer", Act.FAIL), ("fds.send.PoolAnswer", Act.DROP)},
}
"""Of what is no message between processes that stay."""


def is_brief(case: Case) -> bool:
    """What the default run has time for: one fault of a message, another one of the next; of those that take
    their time, which is all but the harmless ones, a third."""
    if case.family in BRIEF:
        return (case.point.name, case.act) in BRIEF[case.family]
    messages = list(dict.fromkeys(case.point for case in CASES if case.family not in BRIEF))
    number = messages.index(case.point)
    quick = case.act in (Act.DELAY, Act.REPEAT)
    return ACTS[number % len(ACTS)] is case.act and (quick or number // len(ACTS) % 3 == 0)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if is_brief(case) else pytest.mark.long) for case in CASES],
)
def test_whatever_goes_wrong_all_ends_once_with_a_reason_and_the_next_transfer_lands(
    request: pytest.FixtureRequest, case: Case
) -> None:
    pair: Pair = request.getfixturevalue("talking" if case.needs_talk else "pair")
    rule = Rule(case.point.name, case.act, process=case.point.process, seconds=0.1)
    first, second = pair.story(rule)
    if case.is_harmless:
        assert (first, second) == (LANDED, CANCELLED)
    else:
        assert set(first) <= {None, *ENDS[case.family]}
        assert set(second) <= {*CANCELS, *ENDS[case.family]}
        pair.works(rule)


SOMEWHAT_LATER = [
    ("peer.send.Announce", catalog.DAEMON, "after", Act.FAIL),
    ("session.send.Reserve", catalog.CLIENT, "after", Act.DELAY),
    ("nixl.open_inlet", catalog.MOVER, "after", Act.DROP),
    ("peer.send.Announce", catalog.DAEMON, "before", Act.REORDER),
    ("nixl.post", catalog.MOVER, "before", Act.REORDER),
]


@pytest.mark.parametrize(
    ("point", "process", "when", "act"),
    [pytest.param(*row, id=f"{row[0]} {row[2]}: {row[3]}") for row in SOMEWHAT_LATER],
)
def test_what_goes_wrong_after_a_step_or_in_another_order_ends_with_a_reason_too(
    pair: Pair, point: str, process: str, when: str, act: Act
) -> None:
    rule = Rule(point, act, when=when, process=process, seconds=0.1)
    first, second = pair.story(rule)
    family = point.partition(".")[0]
    assert set(first) <= {None, *ENDS[family]}
    assert set(second) <= {*CANCELS, *ENDS[family]}
    pair.works(rule)


def test_a_write_that_nothing_is_heard_of_costs_its_way_and_not_its_mover(pair: Pair) -> None:
    lost = Rule("nixl.completion", Act.DROP, node="p")
    mover = pair.p.mover_pid
    first, _ = pair.story(lost)
    assert first == (Reason.TRANSPORT_FAILED, Reason.TRANSPORT_FAILED)
    assert pair.p.mover_pid == mover


def test_each_fault_is_in_the_default_run_on_each_link() -> None:
    brief = {(case.family, case.act) for case in CASES if is_brief(case) and case.family not in BRIEF}
    assert brief == {(family, act) for family in ("peer", "session", "mover") for act in ACTS}


def test_every_point_of_a_process_that_talks_or_moves_bytes_has_a_row() -> None:
    # Those of who receives a message are its sender's over again; the operator's are in test_operator.py.
    rows = {case.point.name for case in CASES}
    sent = {point.name for point in catalog.points() if ".recv." not in point.name}
    assert {name for name in sent if not name.startswith("admin.")} <= rows
