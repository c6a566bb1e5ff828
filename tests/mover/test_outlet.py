# SPDX-License-Identifier: Apache-2.0
"""In what order an outlet finds out what is over: over agents whose transfers end when the test says so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvpushd.core.runs import Runs
from kvpushd.mover.transport.base import Region, Write
from kvpushd.mover.transport.nixl import NixlTransport
from kvpushd.mover.transport.outlet import ALL_ROUNDS, ASKED, Outlet

POOL = Region(b"pool", 0, 1 << 20)
MANY = 40


class Handle:
    """Of a list or of a transfer."""

    def release(self) -> None:
        """Nothing is held."""


class Agents:
    """An agent that carries nothing, and who makes it."""

    errors = (RuntimeError,)

    def __init__(self) -> None:
        self.transfers: list[Handle] = []
        self.done: set[Handle] = set()
        self.asked: list[Handle] = []

    def make(self, name: str, owner: object = None) -> Any:
        return self

    def heard(self, sender: object) -> list[Any]:
        assert sender is not None, "its agent is destroyed"
        return []

    def tell(self, sender: object, name: str, notice: object) -> None:
        """Nobody hears it."""

    def connection_of(self, sender: object) -> bytes:
        return b"near"

    def make_connection(self, name: str) -> None:
        """It is there."""

    def register_memory(self, *of: object) -> Handle:
        return Handle()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"far"

    def prep_xfer_dlist(self, *of: object) -> Handle:
        return Handle()

    def make_prepped_xfer(self, *of: object) -> Handle:
        self.transfers.append(Handle())
        return self.transfers[-1]

    def transfer(self, transfer: Handle) -> None:
        """It is under way."""

    def check_xfer_state(self, transfer: Handle) -> str:
        self.asked.append(transfer)
        return "DONE" if transfer in self.done else "PROC"


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def outlet(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Outlet:
    """With many small writes under way, and without a pause, however long the test may take."""
    monkeypatch.setattr("kvpushd.mover.transport.outlet.STREAK_SECONDS", math.inf)
    outlet = Outlet(agents, "near")  # type: ignore[arg-type]
    outlet.meet("far", b"", {b"pool": 0})
    for number in range(MANY):
        at = np.array([number * 4096])
        outlet.post(Write(number, 1, b"pool", b"pool", Runs(at, at, np.array([4096]))), POOL)
    assert len(agents.transfers) == MANY
    return outlet


def test_of_many_that_are_under_way_only_the_oldest_are_asked_in_most_rounds(
    agents: Agents, outlet: Outlet
) -> None:
    for _ in range(ALL_ROUNDS):
        assert not outlet.moved_on()
    assert len(agents.asked) == (ALL_ROUNDS - 1) * ASKED + MANY
    assert agents.asked[:ASKED] == agents.transfers[:ASKED]


def test_those_that_end_in_their_order_are_found_in_one_round(agents: Agents, outlet: Outlet) -> None:
    agents.done.update(agents.transfers[:30])
    assert outlet.moved_on()
    assert [ended.write_id for ended in outlet.ended] == list(range(30))


def test_one_that_overtakes_the_oldest_is_found_within_some_rounds(agents: Agents, outlet: Outlet) -> None:
    agents.done.add(agents.transfers[-1])
    assert [outlet.moved_on() for _ in range(ALL_ROUNDS)].count(True) == 1
    assert [ended.write_id for ended in outlet.ended] == [MANY - 1]
    assert outlet.in_flight == outlet.transfers == MANY - 1


class Refusing(Agents):
    """Whose agents fail as they begin a transfer: the receiving one is gone."""

    def transfer(self, transfer: Handle) -> None:
        raise RuntimeError("disconnected")


@pytest.mark.parametrize("fabrics", ["tcp,self", "all"])
def test_a_way_that_is_closed_before_its_failed_write_was_heard_of_ends_it_once(
    monkeypatch: pytest.MonkeyPatch, fabrics: str
) -> None:
    monkeypatch.setenv("UCX_TLS", fabrics)
    transport = NixlTransport("near", Refusing)  # type: ignore[arg-type]
    transport.register(POOL)
    transport.open_outlet(1, "far", b"", [POOL])
    at = np.array([0])
    transport.post(Write(7, 1, b"pool", b"pool", Runs(at, at, np.array([4096]))))
    transport.close_outlet(1)
    assert transport.in_flight == 1
    (ended,) = transport.poll()
    assert ended.write_id == 7
    assert ended.fault is not None
    assert transport.poll() == []
    assert transport.handles().outlets == transport.in_flight == 0
