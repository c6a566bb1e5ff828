# SPDX-License-Identifier: Apache-2.0
"""Clockwork models and prompts."""

import random

import pytest

from testing.clockwork import checkpoint
from testing.clockwork.chain import FIRST_ORDINARY_TOKEN
from testing.clockwork.clock import Works

VOCAB = 2048


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Four layers of full attention, 2 KV heads x 64, bf16."""
    return checkpoint.write(tmp_path_factory.mktemp("models") / "plain", checkpoint.Geometry(vocab=VOCAB))


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory):
    """Six layers, four of which see 64 tokens."""
    geometry = checkpoint.Geometry(layers=6, vocab=VOCAB, works=Works(window=64, full_every=3))
    return checkpoint.write(tmp_path_factory.mktemp("models") / "windowed", geometry)


@pytest.fixture(scope="session")
def prompt():
    """`prompt(length, seed)`: ordinary tokens, always the same for the same seed and length."""

    def make(length, seed=0):
        tokens = random.Random(f"{seed}/{length}")
        return [tokens.randrange(FIRST_ORDINARY_TOKEN, VOCAB) for _ in range(length)]

    return make
