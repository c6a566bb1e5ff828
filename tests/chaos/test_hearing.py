# SPDX-License-Identifier: Apache-2.0
"""Who has to hear of a fault, and how soon; and how it shows that an engine did."""

from __future__ import annotations

import pytest

from kvpush_client.events import Connected, Fault, HandoffEnded, Reason, ReservationEnded, TransferKey
from kvpush_client.items import Identity, Role
from testing.chaos.ears import Ears, new_session
from testing.chaos.hearing import LOOK, VISIBLE, Hearing, hearing_of, spares
from testing.chaos.scenario import LONG, SHORT, Blow, Cast, Cut, Phase, Scenario, Strike, Whom
from testing.chaos.stage import DRAIN, SILENCE
from testing.faults.board import Board


def of(node, seconds):
    return Hearing((node,), (node,), seconds)


def scenario(phase, *faults, cast=Cast.PAIR):
    return Scenario(0, cast, phase, faults)


@pytest.mark.parametrize(
    ("phase", "fault", "expected"),
    [
        (Phase.QUEUED, Strike(Whom.P_MOVER, Blow.KILL), of("d", VISIBLE)),
        (Phase.SEALED, Strike(Whom.D_ENGINE, Blow.TERM), of("p", VISIBLE)),
        (Phase.ANNOUNCED, Strike(Whom.P_ENGINE, Blow.KILL), of("d", VISIBLE)),
        (Phase.ANNOUNCED, Strike(Whom.D_ENGINE, Blow.KILL), None),
        (Phase.UNRESERVED, Strike(Whom.P_ENGINE, Blow.KILL), None),
        (Phase.BETWEEN, Strike(Whom.D_DAEMON, Blow.TERM), of("p", DRAIN + VISIBLE)),
        (Phase.BETWEEN, Strike(Whom.D_MOVER, Blow.TERM), None),
        (
            Phase.POSTING,
            Strike(Whom.D_MOVER, Blow.STOP, LONG),
            of("p", SILENCE + LOOK + VISIBLE),
        ),
        (Phase.POSTING, Strike(Whom.D_DAEMON, Blow.STOP, LONG), of("p", SILENCE + VISIBLE)),
        (Phase.POSTING, Strike(Whom.D_MOVER, Blow.STOP, SHORT), None),
        (Phase.POSTING, Strike(Whom.D_ENGINE, Blow.STOP, LONG), None),
        (Phase.POSTING, Cut(LONG), Hearing(("p", "d"), ("d",), SILENCE + VISIBLE)),
        (Phase.POSTING, Cut(SHORT), None),
        (Phase.LANDED, Strike(Whom.P_DAEMON, Blow.KILL), None),
    ],
    ids=str,
)
def test_the_other_side_hears_at_once_of_what_shows_and_after_a_silence_of_what_does_not(
    phase, fault, expected
):
    assert hearing_of(scenario(phase, fault)) == expected


def test_nobody_is_held_to_hear_where_another_fault_may_hide_it():
    assert hearing_of(scenario(Phase.QUEUED, Strike(Whom.P_MOVER, Blow.KILL), Cut(SHORT))) is None
    rank = Strike(Whom.LAST_RANK, Blow.KILL)
    assert hearing_of(scenario(Phase.QUEUED, rank, cast=Cast.RANKS)) is None


def test_only_a_mover_that_is_told_to_end_costs_no_transfer():
    assert spares(scenario(Phase.POSTING, Strike(Whom.D_MOVER, Blow.TERM)))
    assert not spares(scenario(Phase.POSTING, Strike(Whom.D_MOVER, Blow.KILL)))
    assert not spares(scenario(Phase.POSTING, Strike(Whom.D_DAEMON, Blow.TERM)))


def test_what_an_engine_takes_of_its_session_is_heard_and_nothing_before(tmp_path, monkeypatch):
    board = Board(tmp_path)
    for name, value in board.environment("d").items():
        monkeypatch.setenv(name, value)
    session = new_session(tmp_path, Identity("D", "launch", Role.SCHEDULER))
    ears, (ours, other) = Ears(tmp_path), (TransferKey(bytes([n]) * 16) for n in (1, 2))
    gone = Fault(Reason.ENGINE_GONE, "gone")
    session._events += [Connected(bytes(16), "", 0), ReservationEnded(ours, gone, released=True)]
    assert ears.heard("d", ours.transfer_id) is None
    session.poll()
    heard = ears.heard("d", ours.transfer_id)
    session._events.append(HandoffEnded(ours, None))
    session.poll()
    assert ears.heard("d", ours.transfer_id) == heard
    assert ears.heard("p", ours.transfer_id) is None
    assert ears.heard("d", other.transfer_id) is None
