# SPDX-License-Identifier: Apache-2.0
"""Every transition of a half, with every fault at what causes it and at what follows from it.

The cases are not written down but found: each script is played once without a fault, and each transition that
is seen on the way becomes a case for each fault, at that very step. Whatever happens, the world's assertions
hold (no write after fence, no read after release, one end per half, no block lost), the receiver's request
ends within its lease and a second, and nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvpush_client.events import Side
from kvpushd.core.events import PeerMatched, PeerMoving
from kvpushd.core.reservation import TRANSITIONS
from kvpushd.core.words import Phase
from testing.faults.rules import Act
from tests.faults.stage import FAULTS, Fault, Stage, Transition


@dataclass(frozen=True)
class Script:
    """What happens in a world, which of the sender's words are lost in it, where D is, and how many ranks the
    engines have."""

    play: Callable[[Stage], None]
    lost: tuple[type, ...] = ()
    node: str = "B"
    ranks: int = 1


def all_lands(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off()
    stage.run()


def the_sender_comes_first(stage: Stage) -> None:
    stage.hand_off()
    stage.reserve()
    stage.run()


def the_sender_cancels_while_it_writes(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off(computed=16)
    stage.cancel(Side.SENDER)
    stage.run()


def the_sender_cancels_between_two_writes(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off(computed=16)
    stage.run()
    stage.cancel(Side.SENDER)


def the_sender_cancels_before_it_writes(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off(computed=0)
    stage.cancel(Side.SENDER)


def the_receiver_cancels_while_it_is_written(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off()
    stage.cancel(Side.RECEIVER)
    stage.run()


def a_write_fails(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off()
    stage.fail_a_write()
    stage.run()


def the_link_breaks(stage: Stage) -> None:
    stage.reserve()
    stage.hand_off()
    stage.cut()
    stage.run()


SCRIPTS = {
    "all lands": Script(all_lands),
    "the sender comes first": Script(the_sender_comes_first),
    "matched is lost": Script(all_lands, (PeerMatched,)),
    "moving is lost": Script(all_lands, (PeerMoving,)),
    "only landed is heard": Script(all_lands, (PeerMatched, PeerMoving)),
    "cancelled while writing": Script(the_sender_cancels_while_it_writes),
    "cancelled while writing, moving is lost": Script(the_sender_cancels_while_it_writes, (PeerMoving,)),
    "cancelled while writing, only that is heard": Script(
        the_sender_cancels_while_it_writes, (PeerMatched, PeerMoving)
    ),
    "cancelled between writes": Script(the_sender_cancels_between_two_writes),
    "cancelled before writes": Script(the_sender_cancels_before_it_writes),
    "cancelled before writes, only that is heard": Script(
        the_sender_cancels_before_it_writes, (PeerMatched,)
    ),
    "the receiver cancels": Script(the_receiver_cancels_while_it_is_written),
    "a write fails": Script(a_write_fails),
    "the link breaks": Script(the_link_breaks),
    "on one node": Script(all_lands, node="A"),
    "on one node, the receiver cancels": Script(the_receiver_cancels_while_it_is_written, node="A"),
    "on one node, the sender cancels": Script(the_sender_cancels_while_it_writes, node="A"),
    "on one node, a write fails": Script(a_write_fails, node="A"),
    "two ranks": Script(all_lands, ranks=2),
    "two ranks, the receiver cancels": Script(the_receiver_cancels_while_it_is_written, ranks=2),
    "two ranks, the sender cancels": Script(the_sender_cancels_while_it_writes, ranks=2),
    "two ranks, a write fails": Script(a_write_fails, ranks=2),
    "two ranks, the link breaks": Script(the_link_breaks, ranks=2),
}


@dataclass(frozen=True)
class Case:
    """One transition, in one script, and one fault at it."""

    script: str
    transition: Transition
    fault: Fault

    @property
    def name(self) -> str:
        before, what = self.transition
        where = "what follows" if self.fault.follows else "its cause"
        return f"{self.script}: {before.value}-{what.value}, {self.fault.act} at {where}"


def played(script: Script, fault: Fault | None = None) -> Stage:
    stage = Stage(fault, script.lost, node=script.node, ranks=script.ranks)
    script.play(stage)
    return stage


def cases() -> list[Case]:
    found = []
    for name, script in SCRIPTS.items():
        stage = played(script)
        for step, transition in stage.transitions:
            for act in FAULTS:
                found.append(Case(name, transition, Fault(step, act)))
                if step in stage.follows:
                    found.append(Case(name, transition, Fault(step, act, follows=True)))
    return found


CASES = cases()


def test_every_transition_of_a_part_has_a_case_for_every_fault() -> None:
    at_cause = {(case.transition, case.fault.act) for case in CASES if not case.fault.follows}
    assert {(t, a) for t in TRANSITIONS for a in FAULTS} <= at_cause


def test_every_phase_of_a_handoff_has_a_case_for_every_fault() -> None:
    entered = {(case.transition[1], case.fault.act) for case in CASES if not case.fault.follows}
    assert {(phase, act) for phase in Phase for act in FAULTS} <= entered


def test_every_fault_strikes_at_what_follows_too() -> None:
    assert {case.fault.act for case in CASES if case.fault.follows} == set(FAULTS)
    assert set(FAULTS) == set(Act) - {Act.EXIT}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_whatever_goes_wrong_at_a_transition_each_half_ends_once_and_in_time(case: Case) -> None:
    stage = played(SCRIPTS[case.script], case.fault)
    assert stage.fired, "the fault has struck"
    stage.finish()
