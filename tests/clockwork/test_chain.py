# SPDX-License-Identifier: Apache-2.0
"""The clockwork arithmetic, without vLLM."""

import numpy as np

from testing.clockwork import chain

PROMPT = [17, 4, 900, 4, 2047, 17]


def test_a_hash_follows_from_every_token_before_it():
    right = chain.hashes(chain.tags(PROMPT))
    for position in range(len(PROMPT)):
        changed = list(PROMPT)
        changed[position] += 1
        wrong = chain.hashes(chain.tags(changed))
        assert (wrong[:position] == right[:position]).all()
        assert (wrong[position:] != right[position:]).all()


def test_tokens_that_change_places_change_the_hash():
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:]]
    assert chain.hashes(chain.tags(swapped))[-1] != chain.hashes(chain.tags(PROMPT))[-1]


def test_a_chunk_carries_the_tags_of_its_positions():
    assert (chain.tags(PROMPT[2:], first_position=2) == chain.tags(PROMPT)[2:]).all()


def test_constants_differ_between_any_two_words_of_a_model():
    constants = chain.basis(range(24), range(8), 64)
    assert constants.shape == (24, 8, 64)
    assert len(np.unique(constants)) == constants.size


def test_a_rank_has_the_constants_of_its_global_heads():
    assert (chain.basis(range(3), range(2, 4), 8) == chain.basis(range(3), range(4), 8)[:, 2:]).all()


def test_the_reference_goes_on_as_if_its_tokens_had_been_prompted():
    tokens = chain.reference(PROMPT, 12, 2048)
    for count in range(12):
        assert chain.reference([*PROMPT, *tokens[:count]], 12 - count, 2048) == tokens[count:]


def test_the_reference_emits_ordinary_tokens_of_the_vocabulary():
    tokens = chain.reference(PROMPT, 500, 64)
    assert min(tokens) >= chain.FIRST_ORDINARY_TOKEN
    assert max(tokens) < 64
    assert len(set(tokens)) == 60


def test_a_digest_changes_the_token():
    last = int(chain.hashes(chain.tags(PROMPT))[-1])
    right = chain.token_of(last, 0, 1 << 20)
    assert right == chain.reference(PROMPT, 1, 1 << 20)[0]
    assert all(chain.token_of(last, 1 << bit, 1 << 20) != right for bit in range(64))
