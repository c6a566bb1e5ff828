# SPDX-License-Identifier: Apache-2.0
"""Writes a clockwork model's folder: a configuration and a tokenizer, no weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from testing.clockwork.chain import FIRST_ORDINARY_TOKEN
from testing.clockwork.clock import Works

ARCHITECTURE = "ClockworkForCausalLM"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the model. A token's KV takes `bytes_per_token` in every layer together."""

    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    heads: int = 4
    vocab: int = 2048
    dtype: str = "bfloat16"
    max_positions: int = 131072
    works: Works = field(default_factory=Works)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, if the KV cache has the model's dtype."""
        item = {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]
        return self.layers * self.kv_heads * 2 * self.head_dim * item


def write(folder: Path, geometry: Geometry) -> Path:
    """Write the model into `folder` (made if it is missing) and return it. Load it with load_format=dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    # A Qwen3 configuration is what vLLM parses without a config class of ours; no Qwen3 code runs.
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "num_hidden_layers": geometry.layers,
        "num_key_value_heads": geometry.kv_heads,
        "num_attention_heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": geometry.vocab,
        "max_position_embeddings": geometry.max_positions,
        "layer_types": ["full_attention"] * geometry.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": geometry.dtype,
        "clockwork": geometry.works.to_json(),
        **special,
    }
    names = ["<pad>", "<s>", "</s>", "<unk>"]
    words = names + [f"t{token}" for token in range(FIRST_ORDINARY_TOKEN, geometry.vocab)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, name in enumerate(names)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": geometry.max_positions,
    }
    for name, content in {
        "config.json": config,
        "generation_config.json": special,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    return folder
