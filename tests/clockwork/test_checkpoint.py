# SPDX-License-Identifier: Apache-2.0
"""What a clockwork model's folder says, without vLLM."""

import json

import pytest

from testing.clockwork import checkpoint
from testing.clockwork.clock import Clock, Works


def test_a_folder_says_its_geometry_and_its_works(tmp_path):
    works = Works(Clock(seconds_per_step=0.5), verify="first", window=64, full_every=3)
    geometry = checkpoint.Geometry(layers=6, kv_heads=3, head_dim=32, heads=6, works=works)
    config = json.loads((checkpoint.write(tmp_path / "model", geometry) / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (6, 3, 32)
    assert Works.from_json(config["clockwork"]) == works


def test_the_tokenizer_knows_every_token(tmp_path):
    from tokenizers import Tokenizer

    checkpoint.write(tmp_path, checkpoint.Geometry(vocab=100))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("t4 t99 nonsense </s>").ids == [4, 99, 3, 2]


def test_every_nth_layer_is_full_where_others_slide():
    works = Works(window=64, full_every=3)
    assert [works.window_of(layer) for layer in range(6)] == [64, 64, None, 64, 64, None]


def test_without_a_window_every_layer_is_full():
    assert [Works(full_every=3).window_of(layer) for layer in range(4)] == [None] * 4


@pytest.mark.parametrize(
    "entry", [{"verify": "sometimes"}, {"window": 0}, {"clock": {"seconds_per_step": -1}}]
)
def test_an_impossible_entry_is_refused(entry):
    with pytest.raises(ValueError, match=r"must be"):
        Works.from_json(entry)


def test_a_step_takes_its_prompt_tokens_and_one_decode_step():
    clock = Clock(seconds_per_prompt_token=0.5, seconds_per_step=2.0)
    assert clock.duration([10, 1, 1, 4]) == 14 * 0.5 + 2.0
    assert clock.duration([10]) == 5.0
    assert clock.duration([1, 1]) == 2.0
