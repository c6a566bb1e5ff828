# SPDX-License-Identifier: Apache-2.0
"""Who packs for whom: two transports over NIXL in this process, so that what is between them can be seen."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpush_client.events import Reason
from kvpushd.core.runs import Runs
from kvpushd.errors import BadMemory
from kvpushd.memory.host import anonymous, bytes_at
from kvpushd.mover.transport import notices
from kvpushd.mover.transport.base import Completion, Region, Write
from kvpushd.mover.transport.inlet import DOCKS, MOST_HELLOS
from kvpushd.mover.transport.nixl import NixlTransport
from kvpushd.mover.transport.notices import Bell, Hello, Inspect, Notice, Unpacked, Welcome, read
from kvpushd.mover.transport.parcel import SLOT_BYTES, SLOTS, SLOTS_BYTES, Dock

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
        mine = replace(self.region, pool_id=b"as its own mover calls it")
        self.agent = f"{name}-inlet"
        self.metadata = self.receiver.open_inlet(1, self.agent, [mine])
        self.order = np.random.default_rng(8).permutation(COUNT)

    def connect(self, outlet: int = 1, region: Region | None = None) -> None:
        """Opens an outlet, and lets the two sides say what they have to say."""
        self.sender.open_outlet(outlet, self.agent, self.metadata, [region or self.region])
        self.sender._outlets[outlet]._greet()
        self.meet()

    def meet(self) -> None:
        """Lets the two sides hear what they have said."""
        until = time.monotonic() + 0.25
        while time.monotonic() < until:
            self.sender.progress()
            self.receiver.progress()

    def write(self, outlet: int = 1, patience: float = 60.0) -> tuple[Completion, int]:
        """All runs in another order: how it ended, and how many transfers of NIXL's it was at a time."""
        self.sender.post(Write(5, outlet, b"near", b"far", self.runs()))
        return self.wait(patience)

    def runs(self) -> Runs:
        """All of them, or as many as `order` has places for."""
        count = len(self.order)
        return Runs(np.arange(count, dtype=np.int64) * RUN, self.order * RUN, np.full(count, RUN, np.int64))

    @property
    def packer(self) -> str:
        """The agent that packs for the inlet."""
        return next(iter(self.receiver._inlets[1]._met))

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


def welcomes(monkeypatch: pytest.MonkeyPatch, other: Welcome) -> None:
    """Lets senders read another welcome than was said."""

    def misread(said: bytes) -> Notice | None:
        notice = read(said)
        return other if isinstance(notice, Welcome) else notice

    monkeypatch.setattr(notices, "read", misread)


def test_short_runs_go_together_over_tcp(two: Two) -> None:
    two.connect()
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 3)  # 600 x 4 KiB in slots of 1 MiB
    assert two.landed


@pytest.mark.parametrize("two", ["^cma,knem,xpmem"], indirect=True)
def test_they_go_as_they_are_where_other_fabrics_may_carry_them(two: Two) -> None:
    two.connect()
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


def test_they_go_as_they_are_before_the_two_sides_have_met(two: Two) -> None:
    two.sender.open_outlet(1, two.agent, two.metadata, [two.region])
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


@pytest.mark.parametrize("notice", [Hello, Welcome])
def test_they_go_as_they_are_to_who_knows_no_parcels(
    two: Two, notice: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "read", lambda said: None if isinstance(read(said), notice) else read(said))
    two.connect()
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


@pytest.mark.parametrize("lost", [Hello, Welcome])
def test_a_hello_that_is_not_answered_is_said_again(
    two: Two, lost: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as deaf:
        deaf.setattr(notices, "read", lambda said: None if isinstance(read(said), lost) else read(said))
        two.connect()
        assert two.write()[1] == 1
    monkeypatch.setattr("kvpushd.mover.transport.outlet.HELLO_SECONDS", 0.0)
    assert two.write()[1] == 1
    two.meet()
    assert two.write()[1] == 3
    assert two.landed


@pytest.mark.parametrize("other", [Welcome(1, 3, SLOT_BYTES), Welcome(1, SLOTS, SLOT_BYTES + 1)])
def test_they_go_as_they_are_to_who_has_other_slots(
    two: Two, other: Welcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcomes(monkeypatch, other)
    two.connect()
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


def test_each_that_packs_for_an_inlet_has_a_dock_of_its_own(two: Two) -> None:
    for outlet in range(1, DOCKS + 1):
        two.connect(outlet)
    docks = [dock.slots.address for dock in two.receiver._inlets[1]._met.values() if dock is not None]
    assert sorted(docks) == [min(docks) + at * SLOTS_BYTES for at in range(DOCKS)]
    two.connect(DOCKS + 1)
    for outlet, transfers in ((1, 3), (DOCKS, 3), (DOCKS + 1, 1)):
        two.far[:] = 0
        ended, most = two.write(outlet)
        assert (ended.fault, most) == (None, transfers), "beyond so many, runs go as they are"
        assert two.landed


def test_who_has_not_the_token_packs_for_nobody(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "token_of", lambda metadata: secrets.token_bytes(16))
    two.connect()
    assert two.write()[1] == 1
    monkeypatch.undo()
    two.connect(outlet=2)
    assert two.write(outlet=2)[1] == 3


def test_a_hello_from_nonsense_or_from_another_agent_is_not_met(two: Two) -> None:
    inlet, token = two.receiver._inlets[1], notices.token_of(two.metadata)
    agents = two.sender._agents
    other = agents.make(f"{two.agent}-of-another")
    for number, metadata in enumerate((b"nothing of NIXL's", two.metadata, agents.connection_of(other))):
        inlet._hear(f"impostor {number}", Hello(token, metadata))  # one would be tried once for a while
        assert not inlet._met
    inlet._hear(f"{two.agent}-of-another", Hello(token, agents.connection_of(other)))
    assert list(inlet._met) == [f"{two.agent}-of-another"]


def test_hellos_without_end_are_not_listened_to(two: Two) -> None:
    inlet, token = two.receiver._inlets[1], notices.token_of(two.metadata)
    for number in range(MOST_HELLOS):
        inlet._hear(f"impostor {number}", Hello(token, b"nothing"))
    two.connect()
    assert not inlet._met
    assert two.write()[0].fault is None


def test_one_that_can_not_be_reached_is_tried_again_but_not_all_the_time(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    inlet, token = two.receiver._inlets[1], notices.token_of(two.metadata)
    tries: list[str] = []
    monkeypatch.setattr(inlet, "_reaches", lambda sender, _: bool(tries.append(sender)))
    for _ in range(2 * MOST_HELLOS):
        inlet._hear("the sender", Hello(token, b"nothing"))
    assert tries == ["the sender"]
    monkeypatch.setattr("kvpushd.mover.transport.inlet.TRY_SECONDS", 0.0)
    for _ in range(2 * MOST_HELLOS):
        inlet._hear("the sender", Hello(token, b"nothing"))
    assert len(tries) == 1 + 2 * MOST_HELLOS
    monkeypatch.undo()
    two.connect()
    assert two.write()[1] == 3, "and others are met"


def test_who_was_not_met_gets_no_sum(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr("kvpushd.mover.transport.inlet.inspected", lambda *asked: said.append(asked))
    ask = Inspect(1, two.region.address, bytes(16))
    two.receiver._inlets[1]._hear("somebody", ask)
    assert not said
    two.connect()
    two.receiver._inlets[1]._hear(two.packer, ask)
    assert len(said) == 1


def test_bells_without_end_are_answered_once_a_round(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.connect()
    assert two.write()[1] == 3
    inlet, said = two.receiver._inlets[1], []
    monkeypatch.setattr(inlet, "_hear", lambda sender, notice: said.append(notice))
    bells = [Bell(slot, 7) for slot in (0, 1)] * 100 + [Inspect(1, 2, b"x" * 16)] * 100
    monkeypatch.setattr(inlet._agents, "heard", lambda _: [(two.packer, bell) for bell in bells])
    inlet.progress()
    assert said == [Bell(0, 7), Bell(1, 7), Inspect(1, 2, b"x" * 16)]


def test_runs_go_as_they_are_where_memory_is_short(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise BadMemory(f"{nbytes} bytes of memory can't be had")

    monkeypatch.setattr("kvpushd.mover.transport.staging.anonymous", refuse)
    two.connect()
    assert two.write()[1] == 1
    monkeypatch.setattr("kvpushd.mover.transport.inlet.anonymous", refuse)
    two.agent += "-2"
    two.metadata = two.receiver.open_inlet(2, two.agent, [two.region])
    monkeypatch.undo()
    two.connect(outlet=2)
    ended, transfers = two.write(outlet=2)
    assert (ended.fault, transfers) == (None, 1)
    assert two.landed


def test_a_write_ends_only_once_its_parcels_are_unpacked(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.connect()
    late: dict[Bell, None] = {}
    monkeypatch.setattr(Dock, "rang", lambda _, bell: late.setdefault(bell))
    with pytest.raises(TimeoutError):
        two.write(patience=1.0)
    assert len(late) == 3
    assert not two.far.any()
    # Said of another parcel, it says nothing of these.
    monkeypatch.setattr(Dock, "rang", lambda _, bell: Unpacked(bell.slot, bell.number ^ 1))
    for bell in late:
        two.receiver._inlets[1]._hear(two.packer, bell)
    with pytest.raises(TimeoutError):
        two.wait(patience=0.5)
    monkeypatch.undo()
    for bell in late:
        two.receiver._inlets[1]._hear(two.packer, bell)
    ended, _ = two.wait()
    assert ended.fault is None
    assert two.landed


def test_a_parcel_that_is_refused_fails_its_write_says_why_and_the_next_goes_as_it_is(two: Two) -> None:
    beside = replace(two.region, address=two.region.address + RUN)
    two.connect(region=beside)
    ended, _ = two.write()
    assert ended.fault is not None
    assert ended.fault.reason is Reason.TRANSPORT_FAILED
    assert "unpack" in ended.fault.detail
    assert not two.far.any()
    two.order = two.order[two.order < COUNT - 1]
    ended, transfers = two.write()
    assert (ended.fault, transfers) == (None, 1)


def test_who_is_welcomed_to_what_is_not_there_fails_once_and_goes_on_without_parcels(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcomes(monkeypatch, Welcome(4096, SLOTS, SLOT_BYTES))
    two.connect()
    assert two.write()[0].fault is not None
    assert two.write()[0].fault is None
    assert two.landed


def test_a_sender_that_is_gone_is_answered_in_vain_and_others_are_served(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.connect()
    bells: dict[Bell, None] = {}
    monkeypatch.setattr(Dock, "rang", lambda _, bell: bells.setdefault(bell))
    with pytest.raises(TimeoutError):
        two.write(patience=0.5)
    monkeypatch.undo()
    packer = two.packer
    two.sender.cut_outlet(1)
    assert [each.write_id for each in two.sender.poll()] == [5]
    for bell in bells:
        two.receiver._inlets[1]._hear(packer, bell)
    two.agent += "-2"
    two.metadata = two.receiver.open_inlet(2, two.agent, [two.region])
    two.connect(outlet=2)
    assert two.write(outlet=2)[1] == 3
    assert two.landed
