# SPDX-License-Identifier: Apache-2.0
"""Two engines whose KV does not mean the same differ in the field that says why."""

import json
import os
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch

from kvpush_client.vllm.fingerprint import fingerprint_of
from tests.daemon.test_fingerprints import FIELDS

CONFIG = {"model_type": "qwen3", "hidden_size": 64, "rope_theta": 10000.0}
LAYER = "model.layers.0.attn"


def write_model(folder, config=None, weights=b"w" * 100_000, name="model.safetensors"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / name).write_bytes(header({"w": len(weights)}) + weights)
    return folder


def header(tensors):
    """Of a safetensors file with these tensors, by name their sizes, one after the other."""
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


class Layer:
    def __init__(self, backend="CPU_ATTN", isa="amx", head_size=64, kv_cache_dtype="auto"):
        self.isa = isa
        self.kv_cache_dtype = kv_cache_dtype
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
        "text": {},
        "length": 1024,
        "asked_length": None,
        "generation": {},
        "compute": torch.bfloat16,
        "quantization": None,
        "quantization_config": None,
        "architecture": "Qwen3ForCausalLM",
        "classes": {},
        "hf_config_path": None,
        "model_weights": "",
        "multimodal": None,
        "revision": None,
        "commit": None,
        "cache_dtype": "auto",
        "lora": None,
        "engine_id": "E",
        "calculate": False,
        "speculation": None,
    } | changes
    model = SimpleNamespace(
        model=str(folder),
        seed=values["seed"],
        revision=values["revision"],
        hf_overrides=values["hf_overrides"],
        dtype=values["compute"],
        quantization=values["quantization"],
        quantization_config=values["quantization_config"],
        architecture=values["architecture"],
        model_class_overrides=values["classes"],
        hf_config_path=values["hf_config_path"] and str(values["hf_config_path"]),
        model_weights=values["model_weights"],
        multimodal_config=values["multimodal"],
        max_model_len=values["length"],
        original_max_model_len=values["asked_length"] or values["length"],
        # What the configuration allows, which vLLM then fits to the memory.
        get_and_verify_max_len=lambda asked: 4096,
        try_get_generation_config=lambda: dict(values["generation"]),
        override_generation_config={},
        hf_config=SimpleNamespace(_commit_hash=values["commit"], to_dict=lambda: dict(CONFIG)),
        hf_text_config=SimpleNamespace(
            **{
                "model_type": "qwen3",
                "max_position_embeddings": 2048,
                "rope_parameters": values["rope"],
                **values["text"],
            }
        ),
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], calculate_kv_scales=values["calculate"]
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        lora_config=values["lora"],
        speculative_config=values["speculation"] and values["speculation"](model),
        kv_transfer_config=SimpleNamespace(engine_id=values["engine_id"]),
    )
    cache = SimpleNamespace(transfer_groups=groups)
    return fingerprint_of(config, cache, {LAYER: layer or Layer()}, protocol)


def differing(one, other):
    return {name for name in one if one[name] != other[name]}


def speculation(method, **changes):
    """Makes, of the model that drafts are for, what vLLM says of speculation; `changes` make it the draft."""

    def of(model):
        return SimpleNamespace(
            method=method,
            uses_draft_kv_cache=lambda: method not in ("ngram", "suffix"),
            draft_model_config=SimpleNamespace(**vars(model) | changes),
            draft_load_config=None,
        )

    return of


def longrope(original):
    return {"rope_type": "longrope", "rope_theta": 1.0, "original_max_position_embeddings": original}


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
        ("compute", {"quantization_config": {"linear": "fp8_per_block"}}),
        ("compute", {"architecture": "TransformersForCausalLM"}),
        ("compute", {"classes": {"Qwen3ForCausalLM": "module:Class"}}),
        ("model", {"model_weights": "s3://bucket/tuned"}),
        ("model", {"multimodal": SimpleNamespace(mm_processor_kwargs={"max_pixels": 1})}),
        ("draft", {"speculation": speculation("draft_model")}),
        ("draft", {"speculation": speculation("eagle3")}),
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


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ({"rope_parameters": longrope(512)}, 512, 513),
        ({"rope_parameters": {"full_attention": longrope(512), "sliding_attention": {}}}, 512, 1024),
        ({"model_type": "llama4_text"}, 32768, 32769),
        ({"model_type": "minimax_m2", "rope_parameters": {"rope_type": "dynamic"}}, 2048, 2049),
        ({"model_type": "plamo3", "rope_parameters": longrope(512)}, 1024, 2048),
    ],
)
def test_a_length_that_changes_kv_is_named(folder, text, one, other):
    engines = [engine(folder, text=text, length=length) for length in (one, other)]
    assert differing(*engines) == {"max_model_len"}


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ({}, 512, 131072),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 512, 131072),
        ({"rope_parameters": longrope(512)}, 100, 512),
        ({"rope_parameters": longrope(512)}, 513, 131072),
        ({"model_type": "llama4_text"}, 512, 32768),
        ({"model_type": "minimax_m2", "rope_parameters": {"rope_type": "default"}}, 512, 131072),
        ({"model_type": "minimax_m2", "rope_parameters": {"rope_type": "dynamic"}}, 512, 2048),
    ],
)
def test_any_other_length_may_differ(folder, text, one, other):
    engines = [engine(folder, text=text, length=length) for length in (one, other)]
    assert differing(*engines) == set()


def test_what_a_generation_config_says_goes_before_the_length(folder):
    said = {"text": {"model_type": "llama4_text"}, "generation": {"attn_temperature_tuning": True}}
    assert differing(*(engine(folder, length=length, **said) for length in (1024, 65536))) == set()
    assert differing(engine(folder, **said), engine(folder, **said | {"generation": {}})) == {"max_model_len"}


def test_a_length_that_was_fitted_to_the_memory_changes_nothing(folder):
    """The model was made before: for 4096, here."""
    text = {"rope_parameters": longrope(512)}
    fitted = engine(folder, text=text, length=500, asked_length=-1)
    assert differing(fitted, engine(folder, text=text, length=4096)) == set()
    assert differing(fitted, engine(folder, text=text, length=500)) == {"max_model_len"}


def fp8(name):
    return {"quant": "FP8_PER_TENSOR", "dtype": torch.uint8, "layer": Layer(kv_cache_dtype=name)}


def test_the_formats_of_fp8_are_told_apart(folder):
    assert differing(engine(folder, **fp8("fp8_e4m3")), engine(folder, **fp8("fp8_e5m2"))) == {"kv_dtype"}
    assert differing(engine(folder, **fp8("fp8_e4m3")), engine(folder, **fp8("fp8"))) == set()


def test_a_dtype_that_is_named_is_the_models_own(folder):
    assert differing(engine(folder), engine(folder, layer=Layer(kv_cache_dtype="bfloat16"))) == set()


def test_speculation_that_adds_no_kv_may_differ(folder):
    assert differing(engine(folder), engine(folder, speculation=speculation("ngram"))) == set()


def test_another_draft_is_named(folder, tmp_path):
    other = write_model(tmp_path / "draft", weights=b"v" * 100_000)
    changes = ({}, {"model": str(other)}, {"dtype": torch.float16})
    drafts = [engine(folder, speculation=speculation("draft_model", **change)) for change in changes]
    assert [differing(drafts[0], draft) for draft in drafts] == [set(), {"draft"}, {"draft"}]


def test_the_configuration_is_read_where_vllm_reads_it(folder, tmp_path):
    elsewhere = write_model(tmp_path / "elsewhere", {"hidden_act": "relu"})
    same = write_model(tmp_path / "same")
    assert differing(engine(folder), engine(folder, hf_config_path=same)) == set()
    assert differing(engine(folder), engine(folder, hf_config_path=elsewhere)) == {"model"}


def test_a_configuration_of_mistrals_counts(folder):
    plain = engine(folder)
    (folder / "params.json").write_text('{"dim": 64}')
    assert differing(plain, engine(folder)) == {"model"}


def test_weights_of_a_hub_are_not_known_by_the_commit_of_a_configuration_from_elsewhere(folder):
    one, other = (
        engine("org/model", hf_config_path=folder, commit="a" * 40, revision=revision) for revision in "ab"
    )
    assert differing(one, other) == {"model"}


def tune(config):
    return config


def shrink(config):
    return config


def test_overrides_by_a_function_are_known_by_its_name(folder):
    one, same, other = (
        engine(folder, hf_overrides=overrides)
        for overrides in (partial(tune, shrink), partial(tune, shrink), partial(tune, tune))
    )
    assert differing(one, same) == set()
    assert differing(one, other) == {"model"}
    # As in another process, where it lies elsewhere.
    again = FunctionType(tune.__code__, globals(), "tune")
    assert differing(engine(folder, hf_overrides=tune), engine(folder, hf_overrides=again)) == set()


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


def many(folder, count, size, changed=None):
    """A checkpoint of `count` tensors in two files; of tensor `changed` all bytes are others."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for part in range(2):
        names = range(part * count // 2, (part + 1) * count // 2)
        data = b"".join((b"v" if name == changed else b"w") * size for name in names)
        head = header({f"layers.{name}": size for name in names})
        (folder / f"model-{part}.safetensors").write_bytes(head + data)
    return folder


@pytest.mark.parametrize("changed", [0, 1, 333, 350, 699])
def test_a_fine_tune_of_one_tensor_is_another_model(tmp_path, changed):
    base, tuned = many(tmp_path / "base", 700, 2000), many(tmp_path / "tuned", 700, 2000, changed)
    assert differing(engine(base), engine(tuned)) == {"model"}


def test_of_very_many_tensors_each_is_still_looked_at(tmp_path):
    base, tuned = many(tmp_path / "base", 30000, 600), many(tmp_path / "tuned", 30000, 600, 12345)
    assert differing(engine(base), engine(tuned)) == {"model"}


def test_more_tensors_than_that_are_sampled_too(tmp_path):
    """One of each few, that is."""
    base, tuned = many(tmp_path / "base", 70000, 300), many(tmp_path / "tuned", 70000, 300, 0)
    assert differing(engine(base), engine(tuned)) == {"model"}


@pytest.mark.parametrize(
    "weights", [b"version https://git-lfs", b"\xff" * 100, (2).to_bytes(8, "little") + b"[]"]
)
def test_a_file_that_only_looks_like_weights_starts_no_fire(folder, weights):
    plain = engine(folder)
    (folder / "pointer.safetensors").write_bytes(weights)
    assert differing(plain, engine(folder)) == {"model"}


def test_a_model_that_is_one_file_is_sampled(tmp_path):
    for name, byte in (("base", b"w"), ("tuned", b"v")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(byte * 1000)
    one, other = (engine(tmp_path / name / "model.gguf") for name in ("base", "tuned"))
    assert differing(one, other) == {"model"}


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
