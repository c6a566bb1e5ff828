# SPDX-License-Identifier: Apache-2.0
"""Parcels, packed at one end and unpacked at the other, with memory alone between them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpushd.core.runs import Runs
from kvpushd.memory.host import anonymous
from kvpushd.mover.transport import parcel
from kvpushd.mover.transport.notices import Bell, Unpacked
from kvpushd.mover.transport.parcel import (
    NUMBER_BITS,
    SHORT_BYTES,
    SLOT_BYTES,
    SLOTS,
    SLOTS_BYTES,
    Dock,
    Slots,
)

POOL = 8 << 20
PLACE = 0x7F00_0000_1000
HEAD = struct.Struct("<QQQ")


def runs(source: object, target: object, length: object) -> Runs:
    """Runs of lists or arrays."""
    made = np.broadcast_arrays(*(np.array(each, np.int64) for each in (source, target, length)))
    return Runs(*made)


class Ends:
    """A sender's slots and a receiver's dock, and what a transport would do between them."""

    def __init__(self) -> None:
        self.near = Slots(anonymous(SLOTS_BYTES))
        self.source = np.frombuffer(np.random.default_rng(3).bytes(POOL), np.uint8)
        self.target = np.zeros(POOL, np.uint8)
        self.dock = Dock(Slots(anonymous(3 * SLOTS_BYTES), SLOTS_BYTES), {PLACE: self.target})

    def carry(self, slot: int, number: int, carried: Runs, place: int = PLACE) -> None:
        """Packs a parcel and lets it land, with no bell."""
        nbytes = parcel.pack(self.near.slot(slot), number, place, self.source, carried)
        self.dock.slots.slot(slot)[:nbytes] = self.near.slot(slot)[:nbytes]

    def send(self, slot: int, number: int, carried: Runs, place: int = PLACE) -> Unpacked | None:
        """What is said of a parcel that came and whose bell rang."""
        self.carry(slot, number, carried, place)
        return self.dock.rang(Bell(slot, number))


def test_a_parcel_lands_in_its_runs_and_its_word_says_so() -> None:
    ends = Ends()
    order = np.random.default_rng(4).permutation(200)
    carried = runs(np.arange(200) * 4096, order * 4096, 4096)
    assert ends.send(2, 77, carried) == Unpacked(2, 77)
    cells = ends.target.reshape(-1, 4096)
    assert np.array_equal(cells[order], ends.source.reshape(-1, 4096)[:200])
    assert not cells[200:].any()


@given(
    st.lists(st.integers(1, SHORT_BYTES - 1), min_size=1, max_size=400),
    st.integers(0, 1 << 20),
)
def test_parcels_hold_all_runs_once_and_each_has_room_in_a_slot(lengths: list[int], start: int) -> None:
    at = np.cumsum(lengths) - lengths
    parcels = parcel.parcels_of(runs(at, at + start, lengths))
    assert np.concatenate([each.length for each in parcels]).tolist() == lengths
    assert np.concatenate([each.source for each in parcels]).tolist() == at.tolist()
    slot = np.zeros(SLOT_BYTES, np.uint8)
    source = np.zeros(int(sum(lengths)), np.uint8)
    assert all(parcel.pack(slot, 1, PLACE, source, each) <= SLOT_BYTES for each in parcels)


def test_only_many_short_runs_are_worth_it() -> None:
    many = np.arange(parcel.FEW_RUNS + 1) * SHORT_BYTES
    assert parcel.worth_packing(runs(many, many, 4096))
    assert not parcel.worth_packing(runs(many[1:], many[1:], 4096))
    assert not parcel.worth_packing(runs(many, many, SHORT_BYTES))


def test_a_bell_without_its_parcel_unpacks_nothing() -> None:
    ends = Ends()
    ends.carry(0, 5, runs([0], [0], 4096))
    for bell in (Bell(0, 6), Bell(1, 5), Bell(SLOTS, 5), Bell((1 << 64) - 1, 5)):
        assert ends.dock.rang(bell) is None
    assert not ends.target.any()


def test_a_bell_that_rings_twice_unpacks_once() -> None:
    ends = Ends()
    assert ends.send(0, 5, runs([0], [0], 4096)) == Unpacked(0, 5)
    ends.target[:] = 0  # the engine's: it uses its block again
    assert ends.dock.rang(Bell(0, 5)) == Unpacked(0, 5)
    assert not ends.target.any()


WRONG = {
    "beyond the pool": ([POOL - 1], [64]),
    "before the pool": ([-64], [64]),
    "a sum that wraps round": ([(1 << 63) - 32], [64]),
    "more bytes than a slot has": ([0], [SLOT_BYTES]),
    "more bytes than a slot has, together": ([0] * 17, [SLOT_BYTES // 16] * 17),
    "of no length": ([0, 64], [0, 64]),
    "of less than none": ([64, 64], [128, -64]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_parcel_that_leaves_its_pool_or_its_slot_is_refused_and_touches_nothing(
    wrong: tuple[list[int], list[int]],
) -> None:
    ends = Ends()
    offsets, lengths = wrong
    slot = ends.dock.slots.slot(1)
    slot[:] = 255
    HEAD.pack_into(slot.data, 0, 9, PLACE, len(offsets))
    slot[HEAD.size : HEAD.size + 16 * len(offsets)].view(np.int64)[:] = offsets + lengths
    assert ends.dock.rang(Bell(1, 9)) == Unpacked(1, 9, refused=True)
    assert not ends.target.any()


@pytest.mark.parametrize(
    ("count", "place"),
    [(0, PLACE), ((1 << 64) - 1, PLACE), (1 << 60, PLACE), (SLOT_BYTES // 16, PLACE), (1, PLACE + 1), (1, 0)],
)
def test_a_parcel_of_nonsense_is_refused_and_touches_nothing(count: int, place: int) -> None:
    ends = Ends()
    slot = ends.dock.slots.slot(0)
    slot[:] = 1
    HEAD.pack_into(slot.data, 0, 3, place, count)
    assert ends.dock.rang(Bell(0, 3)) == Unpacked(0, 3, refused=True)
    assert not ends.target.any()
    assert ends.send(0, 4, runs([0], [64], 64)) == Unpacked(0, 4)


@given(st.binary(max_size=64), st.integers(0, SLOTS - 1), st.integers(0, (1 << NUMBER_BITS) - 1))
def test_whatever_stands_in_a_slot_no_byte_outside_of_the_pool_is_touched(
    said: bytes, slot: int, number: int
) -> None:
    ends = Ends()
    around = np.zeros(POOL + 2 * 4096, np.uint8)
    ends.dock = Dock(Slots(anonymous(SLOTS_BYTES)), {PLACE: around[4096:-4096]})
    there = ends.dock.slots.slot(slot)
    there[:] = 255
    there[: len(said)] = np.frombuffer(said, np.uint8)
    HEAD.pack_into(there.data, 0, number, PLACE, 3)
    ends.dock.rang(Bell(slot, number))
    assert not around[:4096].any()
    assert not around[-4096:].any()
