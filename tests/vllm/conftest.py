# SPDX-License-Identifier: Apache-2.0
"""vLLM is imported here, once: it warns while it is imported, and warnings are errors in tests."""

import importlib
import importlib.util
import random
import warnings

import pytest

from testing.clockwork import checkpoint
from testing.clockwork.chain import FIRST_ORDINARY_TOKEN
from testing.clockwork.clock import Works

VOCAB = 2048

if importlib.util.find_spec("vllm.v1") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (
            "vllm.v1.core.block_pool",
            "vllm.distributed.kv_transfer.kv_connector.factory",
            "vllm.v1.attention.backends.cpu_attn",
            "kvpush_client.vllm.connector",
        ):
            importlib.import_module(module)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Clockwork models: four full layers; six, of which four see 64 tokens; and 4 KV heads."""
    folder = tmp_path_factory.mktemp("models")
    geometries = {
        "plain": checkpoint.Geometry(vocab=VOCAB),
        "windowed": checkpoint.Geometry(layers=6, vocab=VOCAB, works=Works(window=64, full_every=3)),
        "four_heads": checkpoint.Geometry(vocab=VOCAB, kv_heads=4),
    }
    return {name: checkpoint.write(folder / name, geometry) for name, geometry in geometries.items()}


@pytest.fixture(scope="session")
def prompt():
    """`prompt(length, seed)`: ordinary tokens, always the same for the same seed and length."""

    def make(length, seed=0):
        tokens = random.Random(f"{seed}/{length}")
        return [tokens.randrange(FIRST_ORDINARY_TOKEN, VOCAB) for _ in range(length)]

    return make
