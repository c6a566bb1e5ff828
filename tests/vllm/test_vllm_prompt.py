# SPDX-License-Identifier: Apache-2.0
"""What P and D say of a prompt, so that their daemons can compare."""

import pytest

from kvpush_client.vllm.prompt import digest, digests

TOKENS = [101, 7592, 2088, 102, 151_936]


def test_d_says_the_same_of_a_prompt_as_p_and_of_p_s_with_its_first_token():
    said = {prompt.end: prompt.digest for prompt in digests(TOKENS)}
    assert said == {4: digest(TOKENS, 4), 5: digest([*TOKENS, 9], 5)}
    assert all(len(each) == 16 for each in said.values())


@pytest.mark.parametrize("other", [[101, 7592, 2088, 103, 151_936], [7592, 101, 2088, 102, 151_936]])
def test_one_token_makes_another_digest(other):
    assert digest(other, 4) != digest(TOKENS, 4)
    assert digest(other, 5) != digest(TOKENS, 5)


@pytest.mark.parametrize("tokens", [None, [], [7]])
def test_nothing_is_said_of_what_has_no_tokens(tokens):
    assert digests(tokens) == ()
    assert digest(tokens, 4) == b""
