# SPDX-License-Identifier: Apache-2.0
"""The clockwork model in real vLLM engines: right answers, and wrong bytes named."""

import signal

import pytest

from testing.clockwork.chain import reference
from testing.clockwork.clock import Clock
from testing.clockwork.harness import EngineFailed

VOCAB = 2048
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(harness, model):
    """Prefix caching, blocks of 16, chunks of 64 tokens."""
    with harness.engine(
        "plain", model=model, block_size=16, max_num_batched_tokens=64, enable_prefix_caching=True
    ) as plain:
        plain.ready(90)
        yield plain


@pytest.fixture(scope="module")
def windowed(harness, windowed_model):
    with harness.engine(
        "windowed",
        model=windowed_model,
        block_size=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        num_gpu_blocks_override=120,
        max_model_len=1100,
    ) as sliding:
        yield sliding


@pytest.fixture
def clean(engine):
    """The engine, with nothing cached."""
    assert engine.reset_prefix_cache()
    return engine


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 300])
def test_the_answer_is_the_reference(clean, prompt, length):
    tokens = prompt(length)
    output = clean.submit(tokens, max_tokens=20).result(30)
    assert output.token_ids == reference(tokens, 20, VOCAB)
    assert output.finish_reason == "length"
    assert output.t_submitted < output.t_first < output.t_last


def test_a_repeated_prefix_comes_from_the_cache_and_the_answer_stays(clean, prompt):
    tokens = prompt(100)
    clean.submit(tokens, max_tokens=1).result(30)
    longer = tokens + prompt(30, seed=1)
    output = clean.submit(longer, max_tokens=8).result(30)
    assert output.local_cached_tokens == 96
    assert output.token_ids == reference(longer, 8, VOCAB)


def test_eight_at_once_each_get_their_own_answer(clean, prompt):
    prompts = [prompt(20 + 30 * seed, seed) for seed in range(8)]
    requests = [clean.submit(tokens, max_tokens=12) for tokens in prompts]
    answers = [request.result(60).token_ids for request in requests]
    assert answers == [reference(tokens, 12, VOCAB) for tokens in prompts]


def test_every_block_comes_back_and_every_cell_was_right(clean, prompt):
    clean.submit(prompt(200), max_tokens=5).result(30)
    stats = clean.idle()
    assert stats.free_blocks == stats.blocks - 1
    assert (stats.running, stats.waiting, stats.idle) == (0, 0, True)
    assert stats.mismatches == ()
    assert stats.witness.cells_checked > stats.witness.cells_written > 0


def test_a_running_request_holds_its_blocks_until_it_is_aborted(clean, prompt):
    request = clean.submit(prompt(160), max_tokens=8000, request_id="long")
    request.first_token(30)
    held = clean.stats()
    assert held.free_blocks <= held.blocks - 1 - 10
    clean.abort("long")
    output = request.result(30)
    assert output.finish_reason == "abort"
    assert output.token_ids == reference(prompt(160), len(output.token_ids), VOCAB)
    assert clean.idle().free_blocks == held.blocks - 1


def test_an_id_in_flight_is_not_taken_twice(clean, prompt):
    request = clean.submit(prompt(16), max_tokens=8000, request_id="twice")
    with pytest.raises(ValueError, match="twice is in flight"):
        clean.submit(prompt(16), max_tokens=1, request_id="twice")
    clean.abort("twice")
    request.result(30)


def test_a_clock_set_at_run_time_is_kept(clean, prompt):
    clean.set_clock(Clock(seconds_per_prompt_token=0.002, seconds_per_step=0.01, host_seconds_per_step=0.001))
    output = clean.submit(prompt(100), max_tokens=5).result(30)
    clean.set_clock(Clock())
    assert output.ttft >= 0.2
    assert output.t_last - output.t_first >= 4 * 0.01


def test_one_flipped_byte_is_named_and_changes_every_later_token(harness, model, prompt):
    with harness.engine("flipped", model=model, block_size=16) as engine:
        right = reference(prompt(50), 12, VOCAB)
        engine.corrupt(layer=2, head=1, position=37, byte=77)
        output = engine.submit(prompt(50), max_tokens=12, request_id="wrong").result(90)
        assert output.token_ids[0] == right[0]
        assert all(got != good for got, good in zip(output.token_ids[1:], right[1:], strict=True))
        stats = engine.stats()
        assert stats.witness.flips == 1
        first = stats.mismatches[0]
        assert (first.layer, first.head, first.position, first.byte) == (2, 1, 37, 77)
        assert (first.bad_cells, first.context) == (1, 50)
        assert first.request_id.startswith("wrong-")
        assert first.found ^ first.expected == 0xFF << (77 % 8 * 8)
        assert 0 < first.block < stats.blocks
        assert "position=37" in engine.log_tail()
        engine.idle()
        again = engine.submit(prompt(51), max_tokens=6).result(30)
        assert again.token_ids == reference(prompt(51), 6, VOCAB)


def test_preemption_in_a_tiny_cache_leaves_answers_right(harness, model, prompt):
    with harness.engine(
        "tiny", model=model, block_size=16, num_gpu_blocks_override=24, max_model_len=320
    ) as engine:
        prompts = [prompt(60 + seed, seed) for seed in range(8)]
        requests = [engine.submit(tokens, max_tokens=80) for tokens in prompts]
        answers = [request.result(90).token_ids for request in requests]
        assert answers == [reference(tokens, 80, VOCAB) for tokens in prompts]
        stats = engine.idle()
        assert stats.preemptions > 0
        assert stats.free_blocks == 23
        assert stats.mismatches == ()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
def test_sliding_windows_keep_the_answer(windowed, prompt, length):
    tokens = prompt(length)
    assert windowed.submit(tokens, max_tokens=100).result(90).token_ids == reference(tokens, 100, VOCAB)


def test_sliding_windows_make_groups_whose_old_blocks_are_freed(windowed, prompt):
    groups = windowed.inspect("testing.clockwork.probes:kv_cache_groups", timeout=90)
    assert sorted(window or 0 for _, window in groups) == [0, 64, 64]
    request = windowed.submit(prompt(600), max_tokens=400)
    request.first_token(30)
    held = windowed.stats()
    # The prompt alone takes 38 blocks in each of three groups, were nothing freed.
    assert held.blocks - 1 - held.free_blocks < 3 * 38
    assert request.result(60).token_ids == reference(prompt(600), 400, VOCAB)
    assert windowed.idle().mismatches == ()


def test_a_cached_prefix_of_sliding_layers_keeps_the_answer(windowed, prompt):
    tokens = prompt(200, seed=7)
    windowed.submit(tokens, max_tokens=1).result(90)
    longer = tokens + prompt(40, seed=8)
    output = windowed.submit(longer, max_tokens=8).result(30)
    assert output.local_cached_tokens == 192
    assert output.token_ids == reference(longer, 8, VOCAB)


def test_a_killed_engine_is_reported_at_once_to_who_waits(harness, model, prompt):
    with harness.engine("killed", model=model) as engine:
        engine.ready(90)
        request = engine.submit(prompt(16), max_tokens=8000)
        request.first_token(30)
        engine.kill(signal.SIGKILL)
        with pytest.raises(EngineFailed, match="engine killed ended: SIGKILL"):
            request.result(30)
        with pytest.raises(EngineFailed):
            engine.submit(prompt(16), max_tokens=1)


def test_an_engine_that_cannot_start_says_why(harness, model):
    with (
        harness.engine("hopeless", model=model, block_size=17) as engine,
        pytest.raises(EngineFailed, match=r"(?s)exit status 1.*block"),
    ):
        engine.ready(90)


def test_two_ranks_share_the_heads_and_both_find_bytes(harness, model, prompt):
    with harness.engine("ranks", model=model, block_size=16, tensor_parallel_size=2) as engine:
        engine.ready(120)
        assert engine.inspect("testing.clockwork.probes:sleeps") >= 50  # of 100
        assert engine.submit(prompt(70), max_tokens=8).result(60).token_ids == reference(prompt(70), 8, VOCAB)
        engine.corrupt(layer=0, head=1, position=5, byte=0)
        wrong = engine.submit(prompt(70), max_tokens=8).result(60).token_ids
        assert wrong[1:] != reference(prompt(70), 8, VOCAB)[1:]
        found = engine.stats().mismatches[0]
        assert (found.rank, found.layer, found.head, found.position, found.byte) == (1, 0, 1, 5, 0)
