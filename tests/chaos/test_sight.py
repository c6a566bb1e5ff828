# SPDX-License-Identifier: Apache-2.0
"""What two nodes' lists must say for a transfer to be in its phase."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpush_client._proto import admin_pb2, types_pb2
from testing.chaos import holds
from testing.chaos.holds import Holds
from testing.chaos.scenario import Blow, Cast, Phase, Scenario, Strike, Whom
from testing.chaos.sight import ENDED, FENCING, MATCHED, MOVING, OPEN, Sight
from testing.chaos.stage import Legs
from testing.clockwork.checkpoint import Geometry

LENGTH = 100
ALL = (LENGTH - 1) * Geometry().bytes_per_token


def listed(phase, *, end=LENGTH, bytes=0, fault=None, first_token=0, **times):
    found = admin_pb2.Transfer(
        half=admin_pb2.Half(phase=phase, end=end),
        counts=types_pb2.TransferCounts(bytes=bytes),
        times=types_pb2.TransferTimes(**{f"{name}_unix_ns": at for name, at in times.items()}),
        first_token_unix_ns=first_token,
    )
    if fault is not None:
        found.fault.detail = fault
    return found


def waits(**other):
    return {"p": listed(OPEN), **other}


def is_announced(**other):
    return {"d": listed(OPEN, end=LENGTH - 1), "announced": 1, **other}


def is_queued(**other):
    return {"p": listed(MATCHED), "d": listed(MATCHED), **other}


def moves(**other):
    return {"p": listed(MOVING, bytes=9, first_post=1), "d": listed(MOVING), **other}


def is_sealed(**other):
    return {"p": listed(MOVING, first_post=1, sealed=2), "d": listed(MATCHED), "writes": 1, **other}


def has_landed(**other):
    p = listed(ENDED, bytes=ALL, landed=1)
    return {"p": p, "d": listed(ENDED, end=LENGTH - 1, bytes=ALL, landed=1), **other}


def d_with(**other):
    return listed(ENDED, **{"end": LENGTH - 1, "bytes": ALL, "landed": 1, **other})


@pytest.mark.parametrize(
    ("phase", "seen"),
    [
        (Phase.UNRESERVED, waits()),
        (Phase.ANNOUNCED, is_announced()),
        (Phase.QUEUED, is_queued()),
        (Phase.BETWEEN, moves()),
        (Phase.POSTING, moves(writes=2)),
        (Phase.SEALED, is_sealed()),
        (Phase.SEALED, is_sealed(alone=False, writes=0)),
        (Phase.LANDED, has_landed()),
    ],
)
def test_a_phase_is_reached_as_both_lists_show_it(phase, seen):
    assert Sight(phase, LENGTH, **seen).trouble == ""


@pytest.mark.parametrize(
    ("phase", "seen", "told"),
    [
        (Phase.UNRESERVED, waits(p=None), "does not wait"),
        (Phase.UNRESERVED, waits(p=listed(OPEN, end=0)), "not sealed"),
        (Phase.UNRESERVED, waits(announced=1), "D knows"),
        (Phase.ANNOUNCED, is_announced(announced=0), "was not told"),
        (Phase.ANNOUNCED, is_announced(d=None), "does not wait"),
        (Phase.ANNOUNCED, is_announced(p=listed(MATCHED)), "has handed off"),
        (Phase.QUEUED, is_queued(d=listed(OPEN)), "not both"),
        (Phase.QUEUED, is_queued(p=listed(MATCHED, first_post=1)), "has posted"),
        (Phase.BETWEEN, moves(p=listed(MOVING)), "no byte"),
        (Phase.BETWEEN, moves(writes=1), "writes in flight"),
        (Phase.BETWEEN, moves(p=listed(MOVING, bytes=9, sealed=1)), "the seal"),
        (Phase.POSTING, moves(), "writes in flight"),
        (Phase.POSTING, moves(writes=1, p=listed(MOVING)), "no byte"),
        (Phase.SEALED, is_sealed(writes=0), "writes in flight"),
        (Phase.SEALED, is_sealed(p=listed(MOVING)), "the seal"),
        (Phase.SEALED, is_sealed(p=listed(MOVING, sealed=1, landed=2)), "all has landed"),
        (Phase.LANDED, has_landed(d=d_with(fault="a write failed")), "ended well"),
        (Phase.LANDED, has_landed(d=d_with(landed=0)), "ended well"),
        (Phase.LANDED, has_landed(d=d_with(bytes=ALL - 1)), "not all bytes"),
        (Phase.LANDED, has_landed(d=d_with(end=9)), "another part"),
        (Phase.LANDED, has_landed(d=d_with(first_token=5)), "has seen it"),
    ],
)
def test_a_phase_that_one_of_them_does_not_show_is_not_reached(phase, seen, told):
    assert told in Sight(phase, LENGTH, **seen).trouble


@pytest.mark.parametrize(
    ("phase", "d", "missed"),
    [
        (Phase.QUEUED, listed(MATCHED), False),
        (Phase.QUEUED, listed(FENCING, fault="gone"), True),
        (Phase.SEALED, listed(ENDED), True),
        (Phase.LANDED, listed(ENDED), False),
        (Phase.LANDED, listed(ENDED, fault="gone"), True),
    ],
)
def test_what_has_ended_will_not_come_into_another_phase(phase, d, missed):
    assert Sight(phase, LENGTH, d=d).missed is missed


def test_a_transfer_that_never_comes_into_its_phase_is_not_held(monkeypatch):
    monkeypatch.setattr(holds, "REACH", 0.05)
    node = SimpleNamespace(peers=list)
    stage = SimpleNamespace(nodes={"p": node}, look=lambda name, transfer_id: None, send_d=lambda legs: None)
    stage.send_p = stage.send_d
    scenario = Scenario(0, Cast.PAIR, Phase.ANNOUNCED, (Strike(Whom.D_DAEMON, Blow.KILL),))
    with pytest.raises(TimeoutError, match="P's node was not told of it"):
        Holds(stage, scenario, lambda legs: None).hold(Legs([1] * LENGTH, bytes(16)))
