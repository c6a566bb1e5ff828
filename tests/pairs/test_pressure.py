# SPDX-License-Identifier: Apache-2.0
"""KV caches that are far too small: vLLM preempts all the time, and sliding windows move on meanwhile."""

import secrets

import pytest

from pairs.kit import WAIT, Pair, Side, eventually, settle
from testing.clockwork import checkpoint
from testing.clockwork.clock import Clock, Works
from testing.engines import answer, launch, prompt
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
    hybrid = {"num_gpu_blocks_override": 64, "max_model_len": 512, "enable_prefix_caching": True}
    with (
        launch(harness, "tight-P", "kv_producer", a, model, **tight) as p,
        launch(harness, "tight-D", "kv_consumer", b, model, **tight) as d,
        launch(harness, "windowed-P", "kv_producer", a, windowed, **hybrid) as window_p,
        launch(harness, "windowed-D", "kv_consumer", b, windowed, **hybrid) as window_d,
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


@pytest.fixture
def tightly_windowed(harness, own_nodes, windowed):
    """P has blocks for one long prompt, as vLLM counts them: all of the full group's 30, and two windows'."""
    a, b = own_nodes
    sizes = {"max_model_len": 496, "enable_prefix_caching": False}
    with (
        launch(harness, "narrow-P", "kv_producer", a, windowed, num_gpu_blocks_override=60, **sizes) as p,
        launch(harness, "narrow-D", "kv_consumer", b, windowed, num_gpu_blocks_override=120, **sizes) as d,
    ):
        for engine in (p, d):
            engine.ready(START)
        yield Pair(Side(p, a), Side(d, b))


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


def test_a_prompt_that_just_fits_with_its_windows_is_prefilled_without_a_preemption(tightly_windowed):
    pair = tightly_windowed
    tokens = prompt(480, "just fits")
    assert pair.at_once(tokens, 4).right().external_cached_tokens == 479
    assert pair.p.engine.stats().preemptions == 0


def preemptions(pair):
    return [side.engine.stats().preemptions for side in (pair.p, pair.d)]


def test_hundreds_of_preemptions_change_no_byte(tight):
    crowd(tight, rounds=10, lengths=range(20, 68, 3), count=140)
    assert min(preemptions(tight)) > 150, preemptions(tight)


def test_two_engines_that_wait_for_each_others_memory_go_on(tight):
    """P is full of prompts that D has no room for, D of reservations that P has no room to prefill."""
    finished, wanted = ([prompt(200, f"{kind} {n}") for n in range(2)] for kind in ("finished", "wanted"))
    ids = {id(tokens): secrets.token_bytes(16) for tokens in finished + wanted}
    for tokens in finished:
        tight.prefill(tokens, ids[id(tokens)]).result(WAIT)
    answers = [(tokens, tight.decode(tokens, 4, ids[id(tokens)])) for tokens in wanted]
    eventually("D reserves", lambda: tight.d.node.status().held.reservations == 2)
    assert tight.p.node.status().held.handoffs == 2
    late = [tight.prefill(tokens, ids[id(tokens)]) for tokens in wanted]
    answers += [(tokens, tight.decode(tokens, 4, ids[id(tokens)])) for tokens in finished]
    for tokens, request in answers:
        assert request.result(WAIT).token_ids == answer(tokens, 4)
    for request in late:
        request.result(WAIT)
    # Neither had room for what the other one waited for: what could not be matched gave way in time.
    faults = [tight.received(transfer_id).fault.detail for transfer_id in ids.values()]
    assert any("lease" in fault for fault in faults), faults


def test_windows_move_on_while_bytes_move(windows):
    windows.p.engine.set_clock(Clock(seconds_per_prompt_token=0.0005))
    for length in (17, 63, 64, 65, 80, 129, 300, 480):
        for order in ("at_once", "in_turn"):
            legs = getattr(windows, order)(prompt(length, f"window {order}"), 30)
            assert legs.right().external_cached_tokens == length - 1


def test_what_other_layers_have_moves_long_before_a_window_has_come_to_what_is_wanted(windows):
    windows.p.engine.set_clock(Clock(seconds_per_prompt_token=0.005))
    legs = windows.at_once(prompt(480, "all layers"), 4)
    assert legs.right().external_cached_tokens == 479
    times = windows.sent(legs.transfer_id).times
    # The first chunk is a seventh of the prompt; the first block of a window is past its half.
    assert 2 * times.first_landed_unix_ns < times.opened_unix_ns + times.sealed_unix_ns


def test_windows_and_prefix_hits_go_together(windows):
    shared = prompt(200, "windows hit")
    for tail in range(6):
        tokens = shared + prompt(10 + 20 * tail, tail)
        windows.at_once(tokens, 20).right()
        windows.in_turn(tokens + prompt(30, "more"), 20).right()


def test_windows_and_preemptions_go_together(windows):
    def restarted():
        """Some were preempted on P before they were computed, and started over."""
        halves = [transfer.half for transfer in windows.p.node.transfers()]
        return any(half.attempt for half in halves if half.engine_id == windows.p.engine.name)

    for _ in range(8):  # which are preempted, and when, is the scheduler's luck
        crowd(windows, rounds=3, lengths=range(120, 460, 34), count=50)
        if restarted() and min(preemptions(windows)) > 0:
            break
    assert restarted()
    assert min(preemptions(windows)) > 0, preemptions(windows)
