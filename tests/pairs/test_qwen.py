# SPDX-License-Identifier: Apache-2.0
"""A model that computes: its attention kernels pack the blocks, and its tokens are those of one engine."""

import subprocess
import sys

import pytest

from pairs.kit import WAIT, Pair, Side, settle
from testing.engines import launch, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

BLOCK = 32


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A small Qwen3 with random weights, fp32."""
    folder = tmp_path_factory.mktemp("qwen")
    # In a process of its own: torch is not for this one.
    subprocess.run([sys.executable, "-m", "kvpushctl.demo.model", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def real_pair(harness, nodes, qwen):
    a, b = nodes
    how = {"block_size": BLOCK, "dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 128}
    with (
        launch(harness, "qwen-P", "kv_producer", a, qwen, **how) as p,
        launch(harness, "qwen-D", "kv_consumer", b, qwen, **how) as d,
    ):
        p.ready(240)
        d.ready(240)
        yield Pair(Side(p, a), Side(d, b))


@pytest.mark.parametrize("order", ["at_once", "in_turn"])
def test_a_real_model_s_tokens_are_those_of_one_engine(real_pair, order):
    for length in (BLOCK + 1, 100, 128, 129, 700):
        tokens = prompt(length, f"qwen {order}")
        plain = real_pair.d.engine.submit(tokens, 12).result(WAIT)
        moved = getattr(real_pair, order)(tokens, 12).d.result(WAIT)
        assert moved.external_cached_tokens == length - 1
        assert moved.token_ids == plain.token_ids
    settle(real_pair.p, real_pair.d)
