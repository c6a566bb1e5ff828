# SPDX-License-Identifier: Apache-2.0
"""Which writes are inspected, how much at a time, and what is said of one that is not what was sent."""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter

import numpy as np
import pytest
from mover_kit import cells, layout, soon, way

from kvpush_client.events import Reason
from kvpushd.core.runs import Runs
from kvpushd.memory.host import anonymous
from kvpushd.mover.process import VERIFY
from kvpushd.mover.transport.base import (
    INSPECTED_BYTES,
    INSPECTED_RUNS,
    LOCAL_OUTLET,
    Completion,
    Region,
    Write,
)
from kvpushd.mover.transport.fake import FakeFabric, FakeTransport
from kvpushd.mover.transport.local import LocalCarrier
from kvpushd.mover.verify import SAMPLED, Verifying

SLOT = 4096
SLOTS = 64


class Watched(LocalCarrier):
    """Damages what some writes have landed, and counts what is inspected."""

    def __init__(self) -> None:
        super().__init__()
        self.damages: set[int] = set()
        self.inspected: list[tuple[int, int]] = []
        """Runs and bytes of each inspection."""
        self.inspecting = self.most_inspecting = 0
        self._forth: dict[int, Write] = {}

    def post(self, write: Write) -> None:
        super().post(write)
        self._forth[write.write_id] = write

    def inspect(self, write: Write) -> None:
        super().inspect(write)
        self.inspected.append((len(write.runs.length), int(write.runs.length.sum())))
        self.inspecting += 1
        self.most_inspecting = max(self.most_inspecting, self.inspecting)

    def poll(self) -> list[Completion]:
        done = super().poll()
        for completion in done:
            write = self._forth.pop(completion.write_id, None)
            if write is None:
                self.inspecting -= 1
            elif write.write_id in self.damages:
                last = int(write.runs.target[-1] + write.runs.length[-1]) - 1
                at = self._regions[write.target_pool].address + last
                ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 1, 1)
        return done


class Deaf:
    """A carrier whose inspections of one outlet never end."""

    def __init__(self, inner: FakeTransport, outlet: int) -> None:
        self._inner = inner
        self._outlet = outlet
        self._waiting = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def inspect(self, write: Write) -> None:
        if write.outlet_id == self._outlet:
            self._waiting += 1
        else:
            self._inner.inspect(write)

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight + self._waiting


class Carried:
    """Two pools, and writes between them that are verified, one of `every`."""

    def __init__(self, every: int, slots: int = SLOTS) -> None:
        self.inner = Watched()
        self.verifying = Verifying(self.inner, every)
        self._pools = [anonymous(SLOT * slots) for _ in range(2)]
        np.frombuffer(self._pools[0].view, np.uint8)[:] = np.random.default_rng(1).integers(
            0, 256, SLOT * slots, np.uint8
        )
        for name, pool in zip((b"a", b"b"), self._pools, strict=True):
            self.verifying.register(Region(name, pool.address, pool.nbytes))

    def post(self, write_id: int, slots: int, length: int = SLOT) -> None:
        """A write of so many slots, in runs of a length."""
        at = np.arange(slots * SLOT // length, dtype=np.int64) * length
        runs = Runs(source=at, target=at[::-1].copy(), length=np.full(len(at), length, np.int64))
        self.verifying.post(Write(write_id, LOCAL_OUTLET, b"a", b"b", runs))

    def ends(self) -> list[tuple[int, Reason | None]]:
        """Waits for the ends of all that was posted."""
        ended = []
        while self.verifying.in_flight:
            ended += [(done.write_id, done.fault and done.fault.reason) for done in self.verifying.poll()]
        return ended

    def one_by_one(self, count: int, slots: int = 1) -> list[Reason | None]:
        """So many writes, and how each ended."""
        reasons = []
        for write_id in range(count):
            self.post(write_id, slots)
            ((ended, reason),) = self.ends()
            assert ended == write_id
            reasons.append(reason)
        return reasons


def test_a_sample_inspects_one_write_of_sixteen_and_each_of_its_bytes_once() -> None:
    it = Carried(VERIFY["sample"])
    assert set(it.one_by_one(10 * SAMPLED, slots=5)) == {None}
    assert sum(nbytes for _, nbytes in it.inner.inspected) == 10 * 5 * SLOT
    assert SAMPLED == 16, "as the settings and docs/failures.md say"


@pytest.mark.parametrize(
    ("slots", "length", "most"), [(4800, 2400 * SLOT, INSPECTED_BYTES), (300, 256, INSPECTED_RUNS * 256)]
)
def test_what_is_inspected_at_a_time_has_a_bound_however_large_and_many_the_writes_are(
    slots: int, length: int, most: int
) -> None:
    it = Carried(VERIFY["all"], slots)
    for write_id in range(4):
        it.post(write_id, slots, length)
    assert sorted(it.ends()) == [(write_id, None) for write_id in range(4)]
    runs, nbytes = zip(*it.inner.inspected, strict=True)
    assert sum(nbytes) == 4 * slots * SLOT
    assert max(nbytes) == most
    assert max(runs) <= INSPECTED_RUNS
    assert it.inner.most_inspecting == 1


def test_damage_is_found_in_the_writes_of_the_sample_and_in_no_other() -> None:
    it = Carried(VERIFY["sample"])
    it.inner.damages = set(range(10 * SAMPLED))
    found = it.one_by_one(10 * SAMPLED)
    assert Counter(found) == {Reason.CORRUPTED: 10, None: 150}
    for at in range(0, len(found), SAMPLED):
        assert Counter(found[at : at + SAMPLED]) == {Reason.CORRUPTED: 1, None: 15}


def test_an_outlet_that_does_not_answer_keeps_the_others_from_nothing() -> None:
    fabric = FakeFabric()
    sender, receivers = FakeTransport(fabric), [FakeTransport(fabric) for _ in range(2)]
    pools = [anonymous(SLOT) for _ in range(3)]
    sender.register(Region(b"a", pools[0].address, SLOT))
    for number, (receiver, pool) in enumerate(zip(receivers, pools[1:], strict=True)):
        region = Region(b"b", pool.address, SLOT)
        sender.open_outlet(
            number, f"agent {number}", receiver.open_inlet(1, f"agent {number}", [region]), [region]
        )
    it = Verifying(Deaf(sender, outlet=0))
    runs = Runs(*(np.array([each], np.int64) for each in (0, 0, SLOT)))
    for write_id in range(4):
        it.post(Write(write_id, write_id % 2, b"a", b"b", runs))
    ended = [done.write_id for _ in range(20) for done in it.poll()]
    assert ended == [1, 3]
    assert it.in_flight == 2


@pytest.mark.parametrize("period", [2, SAMPLED, SAMPLED + 1])
def test_damage_that_comes_back_in_step_with_the_writes_is_found(period: int) -> None:
    """As that of one rank's memory does where the ranks take turns."""
    for step in range(period):
        it = Carried(VERIFY["sample"])
        it.inner.damages = set(range(step, 2000, period))
        assert Reason.CORRUPTED in it.one_by_one(2000), step


@pytest.mark.nixl
def test_of_sixteen_damaged_writes_one_fails_where_a_sample_is_verified_and_the_others_land_wrong() -> None:
    async def scene() -> None:
        async with way("nixl", layout(), fault="corrupt-writes", verify="sample") as it:
            found = Counter[Reason | None]()
            for at in range(2 * SAMPLED):
                ended = await soon(it.post([at], [at]))
                found[ended.fault and ended.fault.reason] += 1
            assert found == {Reason.CORRUPTED: 2, None: 2 * SAMPLED - 2}
            wrong = (cells(it.target, it.cut) != cells(it.source, it.cut)).any(axis=(0, 2))
            assert wrong[: 2 * SAMPLED].all()

    asyncio.run(scene())
