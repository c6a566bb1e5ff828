# SPDX-License-Identifier: Apache-2.0
"""Who packs for whom: two transports over NIXL in this process, so that what is between them can be seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpush_client.events import Reason
from kvpushd.core.runs import Runs
from kvpushd.memory.host import anonymous, bytes_at
from kvpushd.mover.transport.base import Completion, Invitation, Landing, Region, Write
from kvpushd.mover.transport.nixl import NixlTransport
from kvpushd.mover.transport.parcel import Dock

pytestmark = pytest.mark.nixl

RUN = 4096
COUNT = 600
POOL = COUNT * RUN


class Two:
    """A sender and a receiver, each with a pool."""

    def __init__(self, name: str) -> None:
        self.sender, self.receiver = NixlTransport(f"{name}-sender"), NixlTransport(f"{name}-receiver")
        self._memory = [anonymous(POOL), anonymous(POOL)]
        self.near, self.far = (bytes_at(each.address, POOL) for each in self._memory)
        self.near[:] = np.frombuffer(np.random.default_rng(7).bytes(POOL), np.uint8)
        self.sender.register(Region(b"near", self._memory[0].address, POOL))
        self.region = Region(b"far", self._memory[1].address, POOL)
        self.invitation = self.receiver.open_inlet(1, f"{name}-inlet", [self.region])
        self.order = np.random.default_rng(8).permutation(COUNT)

    def write(self, outlet: int = 1, patience: float = 60.0) -> tuple[Completion, int]:
        """All runs in another order: how it ended, and how many transfers of NIXL's it was at a time."""
        places = np.arange(COUNT, dtype=np.int64) * RUN
        runs = Runs(places, self.order * RUN, np.full(COUNT, RUN, np.int64))
        self.sender.post(Write(5, outlet, b"near", b"far", runs))
        return self.wait(patience)

    def wait(self, patience: float = 60.0) -> tuple[Completion, int]:
        """The same of the write under way."""
        most, until = 0, time.monotonic() + patience
        while time.monotonic() < until:
            most = max(most, self.sender.handles().transfers)
            ended = self.sender.poll()
            self.sender.progress()
            self.receiver.progress()
            if ended:
                return ended[0], most
        raise TimeoutError("the write does not end")

    @property
    def landed(self) -> bool:
        """Whether all runs are in their places."""
        return np.array_equal(self.far.reshape(COUNT, RUN)[self.order], self.near.reshape(COUNT, RUN))

    def close(self) -> None:
        """Sender first, as its connections are to the receiver."""
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """Over TCP, unless the test says otherwise."""
    monkeypatch.setenv("UCX_TLS", getattr(request, "param", "tcp,self"))
    made = Two(f"packing-{time.monotonic_ns()}")
    yield made
    made.close()


def test_short_runs_go_together_over_tcp(two: Two) -> None:
    assert two.invitation.landing is not None
    two.sender.open_outlet(1, two.invitation, [two.region])
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 3)  # 600 x 4 KiB in slots of 1 MiB
    assert two.landed


@pytest.mark.parametrize("two", ["^cma,knem,xpmem"], indirect=True)
def test_they_go_as_they_are_where_other_fabrics_may_carry_them(two: Two) -> None:
    assert two.invitation.landing is None
    two.sender.open_outlet(1, two.invitation, [two.region])
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


@pytest.mark.parametrize("landing", [None, Landing(0, 3, 1 << 20), Landing(0, 4, 1 << 21)])
def test_they_go_as_they_are_to_who_takes_in_no_parcels_or_other_ones(
    two: Two, landing: Landing | None
) -> None:
    two.sender.open_outlet(1, replace(two.invitation, landing=landing), [two.region])
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


def test_a_write_ends_only_once_its_parcels_are_unpacked(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.sender.open_outlet(1, two.invitation, [two.region])
    late: list[tuple[Dock, bytes]] = []
    rang = Dock.rang
    monkeypatch.setattr(Dock, "rang", lambda dock, message: late.append((dock, message)))
    with pytest.raises(TimeoutError):
        two.write(patience=1.0)
    assert len(late) == 3
    assert not two.far.any()
    monkeypatch.undo()
    for dock, message in late:
        rang(dock, message)
    ended, _ = two.wait()
    assert ended.fault is None
    assert two.landed


def test_a_parcel_that_is_refused_fails_its_write_and_says_why(two: Two) -> None:
    other = Region(b"far", two.region.address, POOL)
    inlet = two.receiver.open_inlet(2, f"{two.invitation.agent}-other", [replace(other, pool_id=b"other")])
    two.sender.open_outlet(1, inlet, [other])
    ended, _ = two.write()
    assert ended.fault is not None
    assert ended.fault.reason is Reason.TRANSPORT_FAILED
    assert "unpack" in ended.fault.detail
    assert not two.far.any()
    # All slots failed: what comes next goes as it is, and lands.
    two.sender.open_outlet(2, two.invitation, [two.region])
    assert two.write(outlet=2)[0].fault is None


def test_where_parcels_fail_the_same_outlet_still_carries_runs_as_they_are(two: Two) -> None:
    astray = Landing(two.region.address, 4, 1 << 20)
    wrong = Invitation(two.invitation.agent, two.invitation.metadata, astray)
    two.sender.open_outlet(1, wrong, [two.region])
    ended, _ = two.write()
    assert ended.fault is not None
    assert two.write()[0].fault is None
    assert two.landed
