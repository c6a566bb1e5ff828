# SPDX-License-Identifier: Apache-2.0
"""Pairs whose sides are cut differently: other TP sizes, other block sizes, one node, both directions."""

import pytest

from pairs.kit import WAIT, Pair, Side, settle
from testing.engines import answer, launch, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(400)]

LENGTHS = (17, 33, 64, 65, 333)


@pytest.fixture(scope="module")
def engines(harness, nodes, model):
    """One engine on node a; on node b one like it, and one with blocks of twice the size."""
    a, b = nodes
    with (
        launch(harness, "far", "kv_both", a, model) as far,
        launch(harness, "near", "kv_both", b, model) as near,
        launch(harness, "wide", "kv_both", b, model, block_size=32) as wide,
    ):
        for engine in (far, near, wide):
            engine.ready(300)
        yield {"far": Side(far, a), "near": Side(near, b), "wide": Side(wide, b)}


@pytest.fixture
def sides(engines):
    yield engines
    settle(*engines.values())


def check(pair, block):
    for length in LENGTHS:
        for order in ("at_once", "in_turn"):
            tokens = prompt(length, f"{pair.p.engine.name} {pair.d.engine.name} {order}")
            pair.moved(getattr(pair, order)(tokens), length - 1 if length - 1 >= block else 0)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [("far", "wide"), ("wide", "far"), ("near", "wide"), ("wide", "near")],
    ids=[
        "blocks of 16 to blocks of 32",
        "blocks of 32 to blocks of 16",
        "on one node, blocks of 16 to blocks of 32",
        "on one node, blocks of 32 to blocks of 16",
    ],
)
def test_a_prompt_arrives_whole_whatever_the_shapes(sides, sender, receiver):
    check(Pair(sides[sender], sides[receiver]), 32 if receiver == "wide" else 16)


# Idle ranks of vLLM's spin, and starve a machine of two cores; two ranks on each side would need four.
@pytest.mark.long
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2)])
def test_a_prompt_arrives_whole_whatever_the_ranks(harness, nodes, model, p_ranks, d_ranks):
    a, b = nodes
    with (
        launch(harness, "ranks-P", "kv_producer", a, model, tensor_parallel_size=p_ranks) as p,
        launch(harness, "ranks-D", "kv_consumer", b, model, tensor_parallel_size=d_ranks, block_size=32) as d,
    ):
        p.ready(300)
        d.ready(300)
        check(Pair(Side(p, a), Side(d, b)), 32)
        settle(Side(p, a), Side(d, b))


def test_two_engines_prefill_for_each_other_at_once(sides):
    there, back = Pair(sides["far"], sides["near"]), Pair(sides["near"], sides["far"])
    sent = []
    for i in range(8):
        for name, pair in (("there", there), ("back", back)):
            legs = pair.at_once(prompt(100 + 20 * i, f"{name} {i}"), 12, d_first=i % 2 == 0)
            sent.append((pair, legs))
    for pair, legs in sent:
        pair.moved(legs, len(legs.tokens) - 1)
        assert legs.p.result(WAIT).token_ids == answer(legs.tokens, 1)


def test_an_answer_s_kv_goes_back_to_where_its_prompt_was_computed(sides):
    """The next turn of a talk: what was decoded on D is prefilled again for P, on D."""
    there, back = Pair(sides["far"], sides["near"]), Pair(sides["near"], sides["far"])
    tokens = prompt(120, "talk")
    tokens = tokens + there.at_once(tokens, 20).right().token_ids + prompt(30, "more")
    back.moved(back.at_once(tokens, 8), len(tokens) - 1)
