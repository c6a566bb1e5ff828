# SPDX-License-Identifier: Apache-2.0
"""What a witness checks in each mode, without vLLM."""

import numpy as np
import pytest

from testing.clockwork import chain
from testing.clockwork.cells import Cells, CLoops
from testing.clockwork.witness import Flip, Span, Witness

BLOCK = 16
WORDS = 8


class Step:
    """A request of 12 blocks in a cache of one head and one layer, stepped by hand."""

    def __init__(self, verify, window=None, blocks=range(12)):
        self.memory = np.zeros(12 * BLOCK * WORDS, np.uint64)
        self.cells = Cells(
            self.memory.ctypes.data, BLOCK * WORDS * 8, BLOCK * WORDS * 8, WORDS * 8, BLOCK, 1, WORDS
        )
        self.witness = Witness(0, layers=2, kv_heads=2, first_head=1, heads=1, loops=CLoops(), verify=verify)
        self.window = window
        self.blocks = np.array(blocks, np.int32)

    def run(self, context, length):
        """Compute positions context to length; the digest, and which ranges were checked."""
        tags = chain.tags(np.arange(10, 10 + length))
        span = Span("request", context, length, tags, chain.hashes(tags))
        new = np.arange(context, length)
        slots = self.blocks[new // BLOCK].astype(np.int64) * BLOCK + new % BLOCK
        rows = self.witness.rows(span, self.blocks, slots, 0, BLOCK, self.window)
        self.witness.flip(1, self.cells, [span], [rows])
        self.witness.write(1, self.cells, [span], [rows])
        self.witness.check(1, self.cells, [span], [rows])
        self.witness.stepped()
        return span.digest, rows.checks


def test_full_checks_the_whole_context_at_each_step():
    step = Step("full")
    assert step.run(0, 100) == (0, ((0, 100),))
    assert step.run(100, 101) == (0, ((0, 101),))
    assert step.witness.counts.cells_written == 101
    assert step.witness.counts.cells_checked == 201


def test_off_checks_nothing():
    step = Step("off")
    step.witness.arm(Flip(layer=1, head=1, position=5, byte=0))
    step.run(0, 100)
    assert step.run(100, 101) == (0, ())
    assert step.witness.counts.flips == 1


def test_first_checks_what_is_new_and_one_earlier_block():
    step = Step("first")
    assert step.run(0, 100) == (0, ((0, 100),))
    _, (new, again) = step.run(100, 101)
    assert new == (100, 101)
    assert again[0] % BLOCK == 0
    assert 0 <= again[0] < again[1] <= 96


def test_first_finds_a_late_write_into_an_earlier_block_in_time():
    step = Step("first")
    step.run(0, 100)
    step.witness.arm(Flip(layer=1, head=1, position=37, byte=3))
    position = 100
    while not step.run(position, position + 1)[0]:
        position += 1
    found = step.witness.mismatches[0]
    assert (found.layer, found.head, found.position, found.block, found.byte) == (1, 1, 37, 2, 3)


def test_first_starts_over_for_a_request_that_was_preempted():
    step = Step("first")
    step.run(0, 100)
    assert step.run(0, 101)[1] == ((0, 101),)


def test_first_starts_over_for_a_request_that_got_other_blocks():
    step = Step("first")
    step.run(0, 96)
    moved = step.blocks.copy()
    moved[[0, 1]] = 11, 10
    step.blocks = moved
    digest, checks = step.run(96, 97)
    assert checks == ((0, 97),)
    assert digest != 0


@pytest.mark.parametrize(("context", "first"), [(0, 0), (31, 0), (32, 1), (100, 69)])
def test_a_window_reads_itself_and_what_is_before_it(context, first):
    step = Step("full", window=32)
    step.run(0, 101)
    assert step.run(context, 101)[1] == ((first, 101),)


def test_a_flip_outside_of_the_window_waits():
    step = Step("full", window=32)
    step.run(0, 100)
    step.witness.arm(Flip(layer=1, head=1, position=5, byte=0))
    assert step.run(100, 101)[0] == 0
    assert step.witness.counts.flips == 0


def test_a_flip_of_another_ranks_head_is_ignored_and_of_no_head_refused():
    step = Step("full")
    step.witness.arm(Flip(layer=1, head=0, position=5, byte=0))
    step.run(0, 100)
    assert step.run(100, 101)[0] == 0
    with pytest.raises(ValueError, match="2 layers with 2 KV heads"):
        step.witness.arm(Flip(layer=1, head=2, position=5, byte=0))
