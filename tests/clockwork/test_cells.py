# SPDX-License-Identifier: Apache-2.0
"""The loops in C against their twin in numpy, over odd strides."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testing.clockwork import chain
from testing.clockwork.cells import Cells, CLoops, NumpyLoops, build


class Cache:
    """A little KV cache of 9 blocks, whose strides have gaps of `gap` words."""

    def __init__(self, heads: int, block_size: int, words: int, gap: int) -> None:
        token = words + gap
        head = token * block_size + gap
        block = head * heads + gap
        self.memory = np.zeros(block * 9, np.uint64)
        self.cells = Cells(self.memory.ctypes.data, block * 8, head * 8, token * 8, block_size, heads, words)


@pytest.fixture(scope="module")
def in_c() -> CLoops:
    return CLoops()


def prompt(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    tags = chain.tags(np.random.default_rng(seed).integers(4, 2048, length))
    return tags, chain.hashes(tags)


@settings(deadline=None, max_examples=60)
@given(
    heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 4, 16]),
    words=st.integers(2, 9),
    gap=st.integers(0, 3),
    share=st.floats(0.1, 1.0),
    flips=st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), max_size=3),
    first=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_both_loops_write_the_same_bytes_and_find_the_same_faults(
    in_c, heads, block_size, words, gap, share, flips, first, seed
):
    length = max(1, int(share * 8 * block_size))
    first = min(first, length - 1)
    tags, hashes = prompt(length, seed)
    blocks = np.random.default_rng(seed).permutation(9).astype(np.int32)
    positions = np.arange(length)
    slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    basis = chain.basis([3], range(heads), words)[0]
    findings = []
    memories = []
    for loops in (in_c, NumpyLoops()):
        cache = Cache(heads, block_size, words, gap)
        loops.fill(cache.cells, slots, hashes, tags, basis)
        assert loops.check(cache.cells, blocks, 0, length, hashes, tags, basis) is None
        for position, head, byte, _ in flips:
            slot = int(slots[position % length])
            cache.cells.flip(slot // block_size, head % heads, slot % block_size, byte % (words * 8))
        findings.append(loops.check(cache.cells, blocks, first, length, hashes, tags, basis))
        memories.append(cache.memory)
    assert findings[0] == findings[1]
    assert (memories[0] == memories[1]).all()


def test_a_flipped_byte_is_named(in_c):
    cache = Cache(heads=2, block_size=16, words=8, gap=1)
    tags, hashes = prompt(40, seed=1)
    basis = chain.basis([0], range(2), 8)[0]
    in_c.fill(cache.cells, np.arange(40), hashes, tags, basis)
    cache.cells.flip(block=2, head=1, slot=5, byte=13)
    finding = in_c.check(cache.cells, np.arange(3, dtype=np.int32), 0, 40, hashes, tags, basis)
    assert (finding.position, finding.head, finding.byte, finding.bad_cells) == (37, 1, 13, 1)
    assert finding.found ^ finding.expected == 0xFF << (5 * 8)


def test_a_cell_of_another_position_is_found_whole(in_c):
    cache = Cache(heads=1, block_size=16, words=8, gap=0)
    tags, hashes = prompt(16, seed=1)
    basis = chain.basis([0], range(1), 8)[0]
    in_c.fill(cache.cells, np.arange(16), hashes, tags, basis)
    swapped = np.arange(16)
    swapped[[3, 4]] = 4, 3
    finding = in_c.check(cache.cells, np.zeros(1, np.int32), 0, 16, hashes[swapped], tags[swapped], basis)
    assert (finding.position, finding.bad_cells) == (3, 2)


def test_a_byte_outside_of_the_cell_is_refused():
    cache = Cache(heads=1, block_size=16, words=8, gap=0)
    with pytest.raises(ValueError, match="outside of a cell of 64 bytes"):
        cache.cells.flip(0, 0, 0, byte=64)


def test_arrays_of_another_type_are_refused(in_c):
    cache = Cache(heads=1, block_size=16, words=8, gap=0)
    tags, hashes = prompt(4, seed=1)
    with pytest.raises(ValueError, match="contiguous array of int64"):
        in_c.fill(cache.cells, np.arange(4, dtype=np.int32), hashes, tags, chain.basis([0], [0], 8)[0])


def test_many_may_build_at_once_and_get_one_library(tmp_path: Path):
    built = []
    threads = [threading.Thread(target=lambda: built.append(build(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 4
    assert list(tmp_path.iterdir()) == [built[0]]
    CLoops(built[0])
