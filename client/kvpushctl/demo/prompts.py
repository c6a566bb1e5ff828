# SPDX-License-Identifier: Apache-2.0
"""What is asked: lengths around a block, several chunks, shared prefixes, repetitions."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvpushctl.demo.model import FIRST_WORD

OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and what is special about them in a few words."""

    tokens: tuple[int, ...]
    about: str


@dataclass(frozen=True, slots=True)
class Script:
    """First one after the other, then all of `together` at once."""

    sequence: tuple[Prompt, ...]
    together: tuple[Prompt, ...]

    @property
    def all(self) -> tuple[Prompt, ...]:
        """In the order in which they are asked."""
        return self.sequence + self.together


def script(block: int, chunk: int, long: int, vocab: int) -> Script:
    """The prompts of a demo: the same every time.

    `block` is the block size in tokens, `chunk` what a prefill step computes at most, `long` the length of
    the longest prompt.
    """
    draw = random.Random(20260)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_WORD, vocab) for _ in range(count))

    several = words(2 * chunk + 5 * block + 7)
    longest = words(long)
    twin = words(chunk + 3 * block + 1)
    return Script(
        sequence=(
            Prompt(words(1), "1 token"),
            Prompt(words(2), "2 tokens"),
            Prompt(words(block - 1), "block - 1"),
            Prompt(words(block), "a block"),
            Prompt(words(block + 1), "block + 1"),
            Prompt(several, "several chunks"),
            Prompt(longest, "long"),
            Prompt(longest[: long // 3] + words(chunk), "prefix of long"),
            Prompt(several, "several, again"),
            Prompt(several + words(block), "several, and on"),
        ),
        together=(
            Prompt(words(3 * block), "at once"),
            Prompt(words(chunk), "at once, a chunk"),
            Prompt(words(chunk + 1), "at once, chunk + 1"),
            Prompt(words(3 * chunk), "at once, 3 chunks"),
            Prompt(twin, "at once, twin"),
            Prompt(twin, "at once, twin"),
            Prompt(longest[: long // 2] + words(2 * block), "at once, prefix of long"),
            Prompt(words(block + 1), "at once, block + 1"),
        ),
    )
