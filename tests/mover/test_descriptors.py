# SPDX-License-Identifier: Apache-2.0
"""The descriptors of a process, by which a mover finds what its agents ring."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvpushd.mover.transport import descriptors
from kvpushd.mover.transport.agents import Agents


def test_an_epoll_is_found_whichever_number_it_gets() -> None:
    # The first gets the number that the listing had.
    before = set(descriptors.names())
    with select.epoll() as first, select.epoll() as second:
        found = descriptors.epolls(set(descriptors.names()) - before)
        assert sorted(found) == sorted([first.fileno(), second.fileno()])


class Owner:
    """Counts how often its agent is looked at."""

    looks = 0

    def progress(self) -> None:
        self.looks += 1


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    made = Agents()
    yield made
    made.close()


def test_one_that_is_closed_meanwhile_is_none() -> None:
    with select.epoll() as closed:
        name = str(closed.fileno())
    assert descriptors.epolls([name]) == []


@pytest.mark.nixl
def test_an_agent_rings_once_it_is_connected_to(agents: Agents) -> None:
    owners = [Owner() for _ in range(4)]
    made = [agents.make(f"rings-{time.monotonic_ns()}", owner) for owner in owners]
    dials = agents.make(f"dials-{time.monotonic_ns()}")
    quiet(agents, [*made, dials])
    for at, (owner, agent) in enumerate(zip(owners, made, strict=True)):
        dials.make_connection(dials.add_remote_agent(agent.get_agent_metadata()).decode())
        deadline = time.monotonic() + 30
        while owner not in (rung := agents.rung()):
            assert time.monotonic() < deadline
        assert not set(owners[at + 1 :]) & set(rung), "nobody has connected to these"


def quiet(agents: Agents, made: list[Any]) -> None:
    """Returns once what was under way between these agents is over: none has rung for a while."""
    deadline, last = time.monotonic() + 30, time.monotonic()
    while time.monotonic() < last + 0.1:
        assert time.monotonic() < deadline
        for agent in made:
            agent.get_new_notifs()
        if agents.rung():
            last = time.monotonic()


@pytest.mark.nixl
def test_one_that_could_never_ring_is_looked_at_in_each_round(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    monkeypatch.setattr(descriptors, "epolls", lambda among: [])
    agent = agents.make(f"silent-{time.monotonic_ns()}", owner)
    assert [agents.rung(), agents.rung()] == [[owner], [owner]]
    assert agents.bell is None, "a mover is not to wait for it"
    del agent, owner
    assert not agents.rung()
    assert agents.bell is not None
