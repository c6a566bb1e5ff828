# SPDX-License-Identifier: Apache-2.0
"""Engines of the same shape whose KV means something else: refused, and the reason says what differs."""

import json
import secrets

import pytest

from pairs.kit import WAIT, Pair, Side, settle
from testing.clockwork import checkpoint
from testing.engines import answer, launch, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]


@pytest.fixture
def subtle(harness, nodes, tmp_path_factory):
    """A D, and engines on P's node that run its model by other arguments, by the field that differs."""
    a, b = nodes
    model = checkpoint.write(tmp_path_factory.mktemp("models") / "long", checkpoint.Geometry())
    config = json.loads((model / "config.json").read_text())
    ones = [1.0] * 32
    scaling = {"rope_type": "longrope", "short_factor": ones, "long_factor": ones, "factor": 4.0}
    config["rope_parameters"] = {"rope_theta": 1e4, "original_max_position_embeddings": 512} | scaling
    (model / "config.json").write_text(json.dumps(config))
    usual = {"kv_cache_dtype": "fp8_e4m3", "max_model_len": 1024}
    with (
        launch(harness, "subtle-D", "kv_consumer", b, model, **usual) as d,
        launch(harness, "length", "kv_producer", a, model, **usual | {"max_model_len": 512}) as length,
        launch(harness, "format", "kv_producer", a, model, **usual | {"kv_cache_dtype": "fp8_e5m2"}) as kind,
        launch(harness, "same", "kv_producer", a, model, kv_cache_dtype="fp8", max_model_len=2048) as same,
    ):
        for engine in (d, length, kind, same):
            engine.ready(240)
        named = {"max_model_len": length, "kv_dtype": kind, "": same}
        yield {field: Pair(Side(engine, a), Side(d, b)) for field, engine in named.items()}


def test_arguments_that_change_what_kv_means_are_named_and_others_may_differ(subtle):
    for field, pair in subtle.items():
        tokens = prompt(100, field)
        legs = pair.at_once(tokens)
        output = legs.right()
        detail = pair.received(legs.transfer_id).fault.detail
        if field:
            assert output.external_cached_tokens == 0
            assert detail.startswith(f"{field} is "), detail
            assert "; " not in detail, detail
        else:
            assert output.external_cached_tokens == 99, detail


@pytest.fixture(scope="module")
def strangers(harness, nodes, model, tmp_path_factory):
    """Engines on P's node that D must not understand, by the field that differs."""
    node, _ = nodes
    folder = tmp_path_factory.mktemp("models")
    other = checkpoint.write(folder / "other", checkpoint.Geometry(vocab=2047))
    turned = checkpoint.write(folder / "turned", checkpoint.Geometry())
    config = (turned / "config.json").read_text()
    (turned / "config.json").write_text(config.replace("{", '{"rope_theta": 777.0,', 1))
    with (
        launch(harness, "vocabulary", "kv_producer", node, other) as vocabulary,
        launch(harness, "weights", "kv_producer", node, model, seed=1) as weights,
        launch(harness, "rope", "kv_producer", node, turned) as rope,
        launch(harness, "dtype", "kv_producer", node, model, kv_cache_dtype="fp8") as dtype,
    ):
        found = {"vocabulary": vocabulary, "weights": weights, "rope": rope, "dtype": dtype}
        for engine in found.values():
            engine.ready(240)
        yield found


@pytest.mark.parametrize(
    ("name", "field"),
    [("vocabulary", "model"), ("weights", "model"), ("rope", "rope"), ("dtype", "kv_dtype")],
)
def test_an_engine_whose_kv_means_something_else_is_refused_and_the_field_named(pair, strangers, name, field):
    wrong = Pair(Side(strangers[name], pair.p.node), pair.d)
    tokens, transfer_id = prompt(100, name), secrets.token_bytes(16)
    prefilled = wrong.prefill(tokens, transfer_id)
    output = wrong.decode(tokens, 4, transfer_id).result(WAIT)
    assert output.token_ids == answer(tokens, 4)
    assert output.external_cached_tokens == 0
    detail = wrong.received(transfer_id).fault.detail
    assert field in detail, detail
    prefilled.result(WAIT)
    assert field in wrong.sent(transfer_id).fault.detail
    settle(wrong.p, wrong.d)
