# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the clockwork model: what every KV cell holds, and which token follows.

A prompt is a chain of 64-bit hashes, one per position: `hash[p] = hash[p-1] + mix(tag[p])`, where the tag of
a position is its token and its number. So the hash at a position follows from every token up to it. The KV
cell of a (layer, head, position) is a row of 64-bit words, each the position's hash turned by a constant of
its layer, head and word; word 1 carries the tag instead, so that a cell says whose it is. All arithmetic is
modulo 2**64. Nothing here knows vLLM.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MASK = (1 << 64) - 1
FIRST_ORDINARY_TOKEN = 4
"""Below it are padding, begin, end and unknown; the model never emits them."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Words) -> Words:
    """A bijection of 64-bit words whose every output bit depends on every input bit (splitmix64's end)."""
    with np.errstate(over="ignore"):
        x = values ^ (values >> np.uint64(30))
        x = x * np.uint64(0xBF58476D1CE4E5B9)
        x = x ^ (x >> np.uint64(27))
        x = x * np.uint64(0x94D049BB133111EB)
        mixed: Words = x ^ (x >> np.uint64(31))
        return mixed


def mix_one(value: int) -> int:
    """`mix` of one word."""
    return int(mix(np.array([value & MASK], np.uint64))[0])


def tags(tokens: Sequence[int] | NDArray[np.integer], first_position: int = 0) -> Words:
    """Token and position of each of `tokens` in one word: token in the low half, position in the high."""
    ids = np.asarray(tokens).astype(np.uint64)
    positions = np.arange(first_position, first_position + len(ids), dtype=np.uint64)
    return ids | (positions << np.uint64(32))


def hashes(tag_words: Words) -> Words:
    """The chain over a prompt's tags, from position 0 on."""
    with np.errstate(over="ignore"):
        return np.cumsum(mix(tag_words + _GOLDEN), dtype=np.uint64)


def basis(layers: Sequence[int], heads: Sequence[int], words: int) -> Words:
    """The constants of cells: shape (layers, heads, words). `heads` are global KV head numbers."""
    layer, head, word = np.meshgrid(
        np.asarray(layers, np.uint64),
        np.asarray(heads, np.uint64),
        np.arange(words, dtype=np.uint64),
        indexing="ij",
    )
    place = (layer << np.uint64(40)) | (head << np.uint64(24)) | word | np.uint64(1 << 63)
    return np.ascontiguousarray(mix(place))


def token_of(last_hash: int, digest: int, vocab: int) -> int:
    """The token that follows a prompt whose last hash is given. `digest` is 0 if every cell was right."""
    return FIRST_ORDINARY_TOKEN + mix_one(last_hash ^ digest) % (vocab - FIRST_ORDINARY_TOKEN)


def reference(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """The `count` tokens that a correct engine emits after `prompt`."""
    last = int(hashes(tags(prompt))[-1])
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(token_of(last, 0, vocab))
        tag = tokens[-1] | (position << 32)
        last = (last + mix_one(tag + int(_GOLDEN))) & MASK
    return tokens
