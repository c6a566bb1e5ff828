# SPDX-License-Identifier: Apache-2.0
"""What a soak takes for growth."""

from __future__ import annotations

import os

import pytest

from testing.soak.load import asks
from testing.soak.meters import Held, Meters, Sample, growth

MIB = 1 << 20


def samples(resident):
    return [Sample(float(at), int(resident(at)), 20, 4) for at in range(100)]


def test_what_fills_up_in_the_beginning_and_then_stays_is_flat():
    found = growth("daemon", "resident_bytes", samples(lambda at: min(at, 25) * MIB + 100 * MIB))
    assert found.flat
    assert found.growth == 0


def test_a_peak_is_no_growth():
    found = growth("daemon", "resident_bytes", samples(lambda at: (300 if at == 90 else 100) * MIB))
    assert found.flat


def test_what_rises_to_the_end_grows():
    found = growth("daemon", "resident_bytes", samples(lambda at: (100 + at / 10) * MIB))
    assert not found.flat
    assert found.growth == pytest.approx(6.9 * MIB, rel=0.02)


def test_three_descriptors_more_are_growth():
    leaking = [Sample(float(at), MIB, 20 + at // 20, 4) for at in range(100)]
    assert not growth("mover", "descriptors", leaking).flat
    assert growth("mover", "threads", leaking).flat


def test_too_short_a_run_says_nothing():
    with pytest.raises(ValueError, match="only 2 samples"):
        growth("mover", "threads", samples(lambda at: MIB)[:3])


def test_meters_look_at_a_living_process():
    meters = Meters({"me": os.getpid()})
    for at in range(4):
        meters.look(float(at))
    by_measure = {found.measure: found for found in meters.growths()}
    assert by_measure["resident_bytes"].median > MIB
    assert by_measure["descriptors"].median >= 3
    assert by_measure["threads"].median >= 1


def test_an_outlet_more_with_each_restart_is_growth_and_busy_transfers_are_not():
    held = [Held(float(at), 1 + at // 20, at % 7, 2 + 2 * (at // 20)) for at in range(100)]
    assert not growth("mover", "outlets", held).flat
    assert not growth("mover", "registrations", held).flat
    assert growth("mover", "transfers", held).flat


def test_a_load_is_the_same_for_the_same_seed_and_mixed():
    drawn = [next(stream) for stream in [asks(3)] for _ in range(400)]
    again = asks(3)
    assert drawn == [next(again) for _ in range(400)]
    lengths = [len(ask.tokens) for ask in drawn]
    assert min(lengths) < 20
    assert max(lengths) > 400
    assert any(ask.patience is not None for ask in drawn)
    assert any(ask.count > 20 for ask in drawn)
