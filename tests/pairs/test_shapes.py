# SPDX-License-Identifier: Apache-2.0
"""Pairs whose sides are cut differently: other TP sizes, other block sizes, one node, both directions."""

import pytest

from pairs.kit import WAIT, Pair, Side, answer, prompt, settle, start

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(400)]

LENGTHS = (17, 33, 64, 65, 333)


@pytest.fixture(scope="module")
def engines(harness, nodes, model):
    """On node a one of two ranks; on node b one rank, and one rank with blocks of twice the size.

    Idle ranks of vLLM's spin: no more of them than there must be.
    """
    a, b = nodes
    with (
        start(harness, "two", "kv_both", a, model, tensor_parallel_size=2) as two,
        start(harness, "one", "kv_both", b, model) as one,
        start(harness, "wide", "kv_both", b, model, block_size=32) as wide,
    ):
        for engine in (two, one, wide):
            engine.ready(300)
        yield {"two": Side(two, a), "one": Side(one, b), "wide": Side(wide, b)}


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
    [("two", "one"), ("one", "two"), ("two", "wide"), ("wide", "two"), ("one", "wide"), ("wide", "one")],
    ids=[
        "TP 2 to TP 1",
        "TP 1 to TP 2",
        "TP 2 to TP 1, blocks of 16 to blocks of 32",
        "TP 1 to TP 2, blocks of 32 to blocks of 16",
        "on one node, blocks of 16 to blocks of 32",
        "on one node, blocks of 32 to blocks of 16",
    ],
)
def test_a_prompt_arrives_whole_whatever_the_shapes(sides, sender, receiver):
    check(Pair(sides[sender], sides[receiver]), 32 if receiver == "wide" else 16)


@pytest.mark.long
def test_a_prompt_arrives_whole_from_two_ranks_in_two_ranks(harness, nodes, model):
    a, b = nodes
    with (
        start(harness, "two-P", "kv_producer", a, model, tensor_parallel_size=2) as p,
        start(harness, "two-D", "kv_consumer", b, model, tensor_parallel_size=2, block_size=32) as d,
    ):
        p.ready(300)
        d.ready(300)
        check(Pair(Side(p, a), Side(d, b)), 32)
        settle(Side(p, a), Side(d, b))


def test_two_engines_prefill_for_each_other_at_once(sides):
    there, back = Pair(sides["two"], sides["one"]), Pair(sides["one"], sides["two"])
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
    there, back = Pair(sides["two"], sides["one"]), Pair(sides["one"], sides["two"])
    tokens = prompt(120, "talk")
    tokens = tokens + there.at_once(tokens, 20).right().token_ids + prompt(30, "more")
    back.moved(back.at_once(tokens, 8), len(tokens) - 1)
