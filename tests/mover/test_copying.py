# SPDX-License-Identifier: Apache-2.0
"""Runs of any lengths, from and to any places, are copied byte by byte as they should be."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpushd.mover.transport.copying import gather, scatter

POOL = 1 << 16

Pairs = list[tuple[int, int]]


@st.composite
def runs(draw: st.DrawFn) -> Pairs:
    """Runs of a pool that don't overlap, in any order, of one length or of several."""
    unit = draw(st.sampled_from([1, 3, 64, 100, 512, 4096]))
    cells = POOL // unit
    cuts = sorted(draw(st.sets(st.integers(0, cells), min_size=2, max_size=40)))
    found = [(first * unit, (last - first) * unit) for first, last in itertools.pairwise(cuts)]
    return draw(st.permutations(found))


def naive(pool: np.ndarray, found: Pairs) -> bytes:
    """The runs, one after another."""
    return b"".join(pool[at : at + length].tobytes() for at, length in found)


@given(runs())
def test_what_is_gathered_is_the_runs_in_their_order(found: Pairs) -> None:
    pool = np.frombuffer(np.random.default_rng(1).bytes(POOL), np.uint8)
    offsets, lengths = np.array(found, np.int64).T
    packed = np.zeros(int(lengths.sum()), np.uint8)
    gather(pool, offsets, lengths, packed)
    assert packed.tobytes() == naive(pool, found)


@given(runs())
def test_what_is_scattered_is_where_the_runs_are_and_nowhere_else(found: Pairs) -> None:
    packed = np.frombuffer(np.random.default_rng(2).bytes(POOL), np.uint8)
    offsets, lengths = np.array(found, np.int64).T
    expected, pool = np.zeros(POOL, np.uint8), np.zeros(POOL, np.uint8)
    taken = 0
    for at, length in found:
        expected[at : at + length] = packed[taken : taken + length]
        taken += length
    scatter(packed[:taken], pool, offsets, lengths)
    assert np.array_equal(pool, expected)
