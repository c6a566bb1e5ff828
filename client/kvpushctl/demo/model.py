# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3 model with fixed random weights. Run as `python -m kvpushctl.demo.model FOLDER`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

FIRST_WORD = 4
"""Tokens below it are special."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The model's shape. 32-bit floats, since only they make outputs comparable token by token."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 512
    vocab: int = 2048
    positions: int = 4096
    seed: int = 20260

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 4


def write(folder: str, geometry: Geometry) -> None:
    """Writes configuration, weights and tokenizer; the same bytes every time."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(geometry.seed)
    config = Qwen3Config(
        vocab_size=geometry.vocab,
        hidden_size=geometry.hidden,
        intermediate_size=geometry.inner,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.positions,
        tie_word_embeddings=False,
        # Wide enough that the best token is never a near tie.
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = special + [f"t{number}" for number in range(FIRST_WORD, geometry.vocab)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], Geometry())
