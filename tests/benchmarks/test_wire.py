# SPDX-License-Identifier: Apache-2.0
"""The wire part's cases are what their names say, and a wrong byte is noticed."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from benchmarks.cpu import cpu_seconds
from benchmarks.wire.case import POOL_BYTES, RUNS, Shape, arrived, pattern, places
from benchmarks.wire.movers import TOKENS, layout
from kvpushd.core.layout import Blocks, Window
from kvpushd.core.plan import plan


@pytest.mark.parametrize(("shape", "runs"), [("contiguous", 1), ("mergeable", 1), ("fragmented", None)])
@pytest.mark.parametrize("run", RUNS)
def test_runs_merge_as_the_case_says(shape: Shape, runs: int | None, run: int) -> None:
    sources, targets = places(shape, run)
    cut = layout(run)
    window = Window(0, len(sources) * TOKENS, 0, 1)
    merged = plan(cut, (Blocks(0, 0, sources),), cut, (Blocks(0, 0, targets),), window)
    assert int(merged.length.sum()) == POOL_BYTES
    if runs is None:
        # A few neighbours stay neighbours by chance.
        assert len(merged.length) > 0.9 * len(sources)
    else:
        assert len(merged.length) == runs


def test_mergeable_runs_are_named_in_no_order() -> None:
    sources, targets = places("mergeable", RUNS[0])
    assert np.count_nonzero(np.diff(sources) == 1) < 0.1 * len(sources)
    assert np.array_equal(sources, targets)


@pytest.mark.parametrize("shape", ["contiguous", "mergeable", "fragmented"])
def test_a_wrong_byte_is_noticed_and_a_right_pool_passes(shape: Shape) -> None:
    run = RUNS[2]
    sources, targets = places(shape, run)
    target = np.zeros(POOL_BYTES, np.uint8)
    target.reshape(-1, run)[targets] = pattern().reshape(-1, run)[sources]
    assert arrived(target, shape, run)
    target[POOL_BYTES // 3] ^= 1
    assert not arrived(target, shape, run)


def test_the_cpu_time_of_a_process_is_what_its_own_clock_says() -> None:
    before = time.process_time()
    seen = cpu_seconds([os.getpid()])
    assert before <= seen <= time.process_time()
