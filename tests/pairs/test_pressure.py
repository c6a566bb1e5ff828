# SPDX-License-Identifier: Apache-2.0
"""KV caches that are far too small: vLLM preempts all the time, and sliding windows move on meanwhile."""

import pytest

from pairs.kit import WAIT, Pair, Side, answer, prompt, settle, start
from testing.clockwork import checkpoint
from testing.clockwork.clock import Clock, Works
from testing.node import Node

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]

START = 240


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Six layers, four of which see 64 tokens."""
    geometry = checkpoint.Geometry(layers=6, works=Works(window=64, full_every=3))
    return checkpoint.write(tmp_path_factory.mktemp("models") / "windowed", geometry)


@pytest.fixture(scope="module")
def own_nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    # A quarter of so few blocks is less than one prompt.
    settings = {"lease": 5, "link_silence": 60, "pinned_share": 1}
    with Node("a", folder, **settings) as a, Node("b", folder, **settings) as b:
        yield a, b


@pytest.fixture(scope="module")
def engines(harness, own_nodes, model, windowed):
    """Four at once: a tight pair, and a tight one with windows."""
    a, b = own_nodes
    tight = {"num_gpu_blocks_override": 31, "max_model_len": 384}
    hybrid = {"num_gpu_blocks_override": 81, "max_model_len": 512, "enable_prefix_caching": True}
    with (
        start(harness, "tight-P", "kv_producer", a, model, **tight) as p,
        start(harness, "tight-D", "kv_consumer", b, model, **tight) as d,
        start(harness, "windowed-P", "kv_producer", a, windowed, **hybrid) as window_p,
        start(harness, "windowed-D", "kv_consumer", b, windowed, **hybrid) as window_d,
    ):
        for engine in (p, d, window_p, window_d):
            engine.ready(START)
        yield Pair(Side(p, a), Side(d, b)), Pair(Side(window_p, a), Side(window_d, b))


@pytest.fixture
def tight(engines):
    yield engines[0]
    settle(engines[0].p, engines[0].d)


@pytest.fixture
def windows(engines):
    yield engines[1]
    engines[1].p.engine.set_clock(Clock())
    settle(engines[1].p, engines[1].d)


def crowd(pair, rounds, lengths, count):
    """Requests that do not fit, on both engines, and between them some that only one engine knows."""
    for number in range(rounds):
        sent = [
            pair.at_once(prompt(length, f"{number} {i}"), count, d_first=i % 2 == 0, p_count=count)
            for i, length in enumerate(lengths)
        ]
        alone = prompt(100, f"alone {number}")
        others = [side.engine.submit(alone, count) for side in (pair.p, pair.d)]
        for legs in sent:
            legs.right()
            assert legs.p.result(WAIT).token_ids == answer(legs.tokens, count)
        for request in others:
            assert request.result(WAIT).token_ids == answer(alone, count)


def preemptions(pair):
    return [side.engine.stats().preemptions for side in (pair.p, pair.d)]


def test_hundreds_of_preemptions_change_no_byte(tight):
    crowd(tight, rounds=10, lengths=range(20, 68, 3), count=140)
    assert min(preemptions(tight)) > 150, preemptions(tight)


def test_windows_move_on_while_bytes_move(windows):
    windows.p.engine.set_clock(Clock(seconds_per_prompt_token=0.0005))
    for length in (17, 63, 64, 65, 80, 129, 300, 480):
        for order in ("at_once", "in_turn"):
            legs = getattr(windows, order)(prompt(length, f"window {order}"), 30)
            assert legs.right().external_cached_tokens == length - 1


def test_windows_and_prefix_hits_go_together(windows):
    shared = prompt(200, "windows hit")
    for tail in range(6):
        tokens = shared + prompt(10 + 20 * tail, tail)
        windows.at_once(tokens, 20).right()
        windows.in_turn(tokens + prompt(30, "more"), 20).right()


def test_windows_and_preemptions_go_together(windows):
    crowd(windows, rounds=4, lengths=range(60, 230, 17), count=50)
    assert min(preemptions(windows)) > 0, preemptions(windows)
    # Some were preempted on P before they were computed, and started over.
    assert any(transfer.half.attempt for transfer in windows.p.node.transfers())
