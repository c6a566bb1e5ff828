# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvpushctl.demo.model import FIRST_WORD
from kvpushctl.demo.prompts import script

BLOCK, CHUNK, LONG, VOCAB = 32, 512, 3000, 2048


def test_the_lengths_lie_around_every_edge() -> None:
    lengths = {len(prompt.tokens) for prompt in script(BLOCK, CHUNK, LONG, VOCAB).sequence}
    assert {1, 2, BLOCK - 1, BLOCK, BLOCK + 1, LONG} <= lengths
    assert any(2 * CHUNK < length < LONG for length in lengths)


def test_some_share_a_prefix_and_some_are_repeated() -> None:
    asked = [prompt.tokens for prompt in script(BLOCK, CHUNK, LONG, VOCAB).sequence]
    assert len(set(asked)) < len(asked)
    shared = [
        (one, other)
        for one in asked
        for other in asked
        if one != other and len(one) > BLOCK and one[:BLOCK] == other[:BLOCK]
    ]
    assert shared


def test_eight_are_asked_at_once() -> None:
    assert len(script(BLOCK, CHUNK, LONG, VOCAB).together) == 8


def test_the_prompts_are_the_same_every_time_and_hold_ordinary_words() -> None:
    once, again = (script(BLOCK, CHUNK, LONG, VOCAB) for _ in range(2))
    assert once == again
    assert all(FIRST_WORD <= token < VOCAB for prompt in once.all for token in prompt.tokens)
