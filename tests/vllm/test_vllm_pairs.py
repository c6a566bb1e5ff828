# SPDX-License-Identifier: Apache-2.0
"""Pairs that differ: windows, ranks, memory too small, daemons that die, a real model."""

import json
import uuid

import pytest
from pair_kit import DEADLINE, SEND, Pair, right

from testing.clockwork.clock import Clock
from testing.clockwork.harness import EngineFailed

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]


@pytest.mark.parametrize("length", [40, 64, 65, 300])
def test_sliding_windows(windows, prompt, length):
    tokens = prompt(length, seed=1)
    assert right(windows.one_after_the_other(tokens), tokens)
    on_p, on_d = windows.at_once(tokens := prompt(length, seed=2))
    on_p.result(DEADLINE)
    assert right(on_d.result(DEADLINE), tokens)
    windows.settle()


@pytest.fixture(scope="module")
def windows(harness, models, tmp_path_factory):
    with Pair(harness, tmp_path_factory.mktemp("windows"), models["windowed"]) as pair:
        yield pair


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2)])
def test_tensor_parallel_sizes_that_differ(harness, models, tmp_path, prompt, p, d):
    ranks = {"p": {"tensor_parallel_size": p}, "d": {"tensor_parallel_size": d}}
    with Pair(harness, tmp_path, models["four_heads"], **ranks) as pair:
        tokens = prompt(200)
        assert right(pair.one_after_the_other(tokens), tokens)
        on_p, on_d = pair.at_once(tokens := prompt(300))
        on_p.result(DEADLINE)
        assert right(on_d.result(DEADLINE), tokens)
        pair.settle()


def test_preemptions_on_p_start_new_attempts_and_every_answer_is_right(harness, models, tmp_path, prompt):
    # 40 blocks: two prompts that decode and a third that is prefilled in small steps do not fit for long.
    small = {"kv_cache_bytes": 40 * 16 * 2048, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    with Pair(harness, tmp_path, models["plain"], p=small, max_model_len=512, lease=60) as pair:
        prompts = [prompt(190 + seed, seed=seed) for seed in range(8)]
        legs = []
        for tokens in prompts:
            named = {"transfer_id": uuid.uuid4().hex}
            on_d = pair.d.submit(tokens, max_tokens=4, params=pair.coordinates | named)
            on_p = pair.p.submit(tokens, max_tokens=100, params=SEND | named)
            legs.append((on_p, on_d))
        for (on_p, on_d), tokens in zip(legs, prompts, strict=True):
            assert right(on_p.result(120), tokens)
            assert right(on_d.result(120), tokens)
        assert pair.p.stats().preemptions > 0
        assert any(transfer.half.attempt > 0 for transfer in pair.p_node.transfers())
        pair.settle()


def test_engines_outlive_their_daemons(harness, models, tmp_path, prompt):
    with Pair(harness, tmp_path, models["plain"]) as pair:
        pair.p.set_clock(Clock(seconds_per_prompt_token=0.002))
        tokens = prompt(800, seed=1)
        on_p, on_d = pair.at_once(tokens)
        pair.d_node.kill()
        pair.p_node.kill()
        assert right(on_d.result(DEADLINE), tokens)
        assert on_p.result(DEADLINE).kv_transfer_params is None
        pair.p.set_clock(Clock())
        alone = prompt(200, seed=2)
        assert right(pair.d.submit(alone, max_tokens=4, params=pair.coordinates).result(DEADLINE), alone)
        pair.settle()
        pair.p_node.start()
        pair.d_node.start()
        for seed in range(3, 200):
            output = pair.one_after_the_other(again := prompt(200, seed=seed))
            assert right(output, again)
            if output.external_cached_tokens == 199:
                break
        else:
            pytest.fail("the engines did not find their daemons again")
        pair.settle()


def test_without_recompute_a_failed_load_fails_its_request_only(harness, models, tmp_path, prompt):
    with Pair(harness, tmp_path, models["plain"], policy="fail") as pair:
        pair.d_node.kill()
        params = pair.coordinates | {"transfer_id": uuid.uuid4().hex}
        failed = pair.d.submit(prompt(200), max_tokens=4, params=params).result(DEADLINE)
        assert failed.finish_reason == "error"
        tokens = prompt(100)
        assert right(pair.d.submit(tokens, max_tokens=4).result(DEADLINE), tokens)
        pair.settle()


def test_an_engine_without_a_daemon_says_where_it_looked_and_what_to_do(harness, models, tmp_path):
    config = {
        "kv_connector": "KvpushConnector",
        "kv_connector_module_path": "kvpush_client.vllm.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"runtime_dir": str(tmp_path / "nowhere"), "start_timeout": 0.2},
    }
    with harness.engine("alone", model=models["plain"], block_size=16, kv_transfer_config=config) as engine:
        with pytest.raises(EngineFailed):
            engine.ready(60)
        said = engine.log.read_text()
    assert "nowhere/kvpushd.sock" in said
    assert "systemctl status kvpushd" in said


def write_qwen3(folder):
    """A tiny Qwen3 with random weights in fp32, whose attention is vLLM's own."""
    import torch
    from safetensors.torch import save_file

    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": 512}
    config = shape | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "float32",
        "eos_token_id": 511,
    }
    sizes = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        sizes |= {f"{name}.{norm}.weight": (64,) for norm in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {f"{name}.self_attn.{norm}.weight": (32,) for norm in ("q_norm", "k_norm")}
        sizes |= {f"{name}.self_attn.{proj}.weight": (64, 64) for proj in ("k_proj", "v_proj")}
        sizes |= {f"{name}.self_attn.q_proj.weight": (128, 64), f"{name}.self_attn.o_proj.weight": (64, 128)}
        sizes |= {f"{name}.mlp.{proj}.weight": (128, 64) for proj in ("gate_proj", "up_proj")}
        sizes[f"{name}.mlp.down_proj.weight"] = (64, 128)
    generator = torch.Generator().manual_seed(7)
    save_file(
        {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()},
        str(folder / "model.safetensors"),
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_real_model_whose_kernels_pack_their_blocks_is_token_exact_in_fp32(harness, tmp_path, prompt):
    model = write_qwen3(tmp_path)
    with Pair(harness, tmp_path, model, block_size=32, max_num_batched_tokens=96) as pair:
        for length in (40, 64, 65, 97, 300):
            tokens = [token % 500 + 4 for token in prompt(length)]
            alone = pair.p.submit(tokens, max_tokens=12).result(DEADLINE)
            output = pair.one_after_the_other(tokens, max_tokens=12)
            assert output.token_ids == alone.token_ids
            assert output.external_cached_tokens == length - 1
        assert len(set(alone.token_ids)) > 1
