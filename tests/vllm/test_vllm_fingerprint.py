# SPDX-License-Identifier: Apache-2.0
"""Two engines whose KV does not mean the same differ in the field that says why."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from kvpush_client.vllm.fingerprint import fingerprint_of
from tests.daemon.test_fingerprints import FIELDS

CONFIG = {"model_type": "qwen3", "hidden_size": 64, "rope_theta": 10000.0}
LAYER = "model.layers.0.attn"


def write_model(folder, config=None, weights=b"w" * 100_000, name="model.safetensors"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)]}}).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return folder


class Layer:
    def __init__(self, backend="CPU_ATTN", isa="amx", head_size=64):
        self.isa = isa
        self.head_size = head_size
        self._backend = backend

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: self._backend)


def engine(folder, *, layer=None, dtype=torch.bfloat16, quant="NONE", protocol="1", **changes):
    """The fingerprint of an engine that serves `folder`."""
    spec = SimpleNamespace(dtype=dtype, kv_quant_mode=SimpleNamespace(name=quant))
    groups = [SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec)]
    values = {
        "load_format": "auto",
        "seed": 0,
        "hf_overrides": {},
        "rope": {"rope_theta": 10000.0},
        "compute": torch.bfloat16,
        "quantization": None,
        "revision": None,
        "commit": None,
        "cache_dtype": "auto",
        "lora": None,
        "engine_id": "E",
        "calculate": False,
    } | changes
    model = SimpleNamespace(
        model=str(folder),
        seed=values["seed"],
        revision=values["revision"],
        hf_overrides=values["hf_overrides"],
        dtype=values["compute"],
        quantization=values["quantization"],
        hf_config=SimpleNamespace(_commit_hash=values["commit"], to_dict=lambda: dict(CONFIG)),
        hf_text_config=SimpleNamespace(rope_parameters=values["rope"]),
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], calculate_kv_scales=values["calculate"]
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        lora_config=values["lora"],
        kv_transfer_config=SimpleNamespace(engine_id=values["engine_id"]),
    )
    cache = SimpleNamespace(transfer_groups=groups)
    return fingerprint_of(config, cache, {LAYER: layer or Layer()}, protocol)


def differing(one, other):
    return {name for name in one if one[name] != other[name]}


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def test_the_same_model_elsewhere_is_the_same(folder, tmp_path):
    copy = write_model(
        tmp_path / "deep" / "copy", {"_name_or_path": "elsewhere", "transformers_version": "5"}
    )
    assert differing(engine(folder), engine(copy)) == set()


def test_engines_of_other_names_are_the_same(folder):
    assert differing(engine(folder, engine_id="P"), engine(folder, engine_id="D")) == set()


def test_each_field_is_refused_by_daemons_too(folder):
    """What two daemons say of each field is tested with the daemons."""
    assert set(engine(folder)) == set(FIELDS)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("protocol", {"protocol": "2"}),
        ("model", {"hf_overrides": {"rope_theta": 1.0}}),
        ("model", {"load_format": "dummy"}),
        ("compute", {"compute": torch.float16}),
        ("compute", {"quantization": "awq"}),
        ("adapter", {"lora": SimpleNamespace(default_mm_loras={"image": "/adapters/x"})}),
        ("kv_dtype", {"dtype": torch.float16}),
        ("kv_dtype", {"quant": "FP8_PER_TENSOR"}),
        ("kv_scales", {"cache_dtype": "fp8"}),
        ("attention", {"layer": Layer(backend="CLOCKWORK")}),
        ("attention", {"layer": Layer(isa="vec")}),
        ("rope", {"rope": {"rope_theta": 20000.0}}),
        ("rope", {"rope": {"rope_theta": 10000.0, "rope_type": "yarn"}}),
        ("head_size", {"layer": Layer(head_size=128)}),
    ],
)
def test_what_differs_is_named(folder, field, changes):
    assert differing(engine(folder), engine(folder, **changes)) == {field}


def test_dummy_weights_differ_by_seed(folder):
    one, other = (engine(folder, load_format="dummy", seed=seed) for seed in (0, 1))
    assert differing(one, other) == {"model"}


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"hidden_size": 128}},
        {"weights": b"w" * 100_001},
        {"weights": b"v" * 100_000},
        {"weights": b"w" * 99_999 + b"v"},
    ],
)
def test_another_configuration_or_other_weights_are_another_model(folder, tmp_path, other):
    assert differing(engine(folder), engine(write_model(tmp_path / "other", **other))) == {"model"}


def test_a_hubs_snapshot_is_known_by_its_commit():
    one, same, other = (engine("org/model", commit=commit) for commit in ("a" * 40, "a" * 40, "b" * 40))
    assert differing(one, same) == set()
    assert differing(one, other) == {"model"}


def test_scales_that_an_engine_calculates_are_nobody_elses(folder):
    one, other = (engine(folder, cache_dtype="fp8", calculate=True, engine_id=name) for name in "PD")
    assert differing(one, other) == {"kv_scales"}


def test_values_are_short_whatever_a_configuration_holds(folder):
    long = engine(folder, rope={"long_factor": [float(i) for i in range(5000)]})
    assert max(len(value) for value in long.values()) <= 1024


def test_a_large_checkpoint_is_not_read_whole(tmp_path):
    folder = write_model(tmp_path / "large")
    os.truncate(folder / "model.safetensors", 1 << 40)
    # A sparse terabyte: reading it would take minutes, and the test's own deadline with it.
    assert engine(folder) == engine(folder)
