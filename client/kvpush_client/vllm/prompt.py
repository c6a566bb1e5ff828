# SPDX-License-Identifier: Apache-2.0
"""What a prompt's positions are of, as a digest that P's engine and D's can compare.

Each engine makes tokens of a request by itself. Where they don't make the same of it (another chat template,
or one that names the date, at midnight), P's KV is of another prompt, and nothing else would tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvpush_client.items import Prompt

DIGEST_BYTES = 16


def digest(tokens: Sequence[int] | None, end: int) -> bytes:
    """Of the first `end` tokens; empty where there are not as many (of a prompt that is given as embeddings).

    A hundred thousand tokens take some milliseconds.
    """
    if tokens is None or not 0 < end <= len(tokens):
        return b""
    return _hash(tokens[:end]).digest()


def digests(tokens: Sequence[int] | None) -> tuple[Prompt, ...]:
    """What P says: of all but the last token, which is what D wants of the same prompt, and of all, which it
    wants where a router has added P's first token to D's prompt."""
    if tokens is None or len(tokens) < 2:
        return ()
    hashed = _hash(tokens[:-1])
    before = Prompt(len(tokens) - 1, hashed.digest())
    hashed.update(_bytes(tokens[-1:]))
    return before, Prompt(len(tokens), hashed.digest())


def _hash(tokens: Sequence[int]) -> hashlib.blake2b:
    return hashlib.blake2b(_bytes(tokens), digest_size=DIGEST_BYTES)


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i8").tobytes()
