# SPDX-License-Identifier: Apache-2.0
"""What a soak asks of its engines: an endless seeded list of requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from testing.engines import prompt

PREFIXES = 16
"""Prompts that others begin with."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `patience`: seconds after which its client leaves; None = it stays."""

    number: int
    tokens: list[int]
    count: int
    d_first: bool
    in_turn: bool
    patience: float | None


def asks(seed: int) -> Iterator[Ask]:
    """All of them: mostly short; some share a prefix, some are left early, some answer at length."""
    chance = random.Random(seed)
    shared = [prompt(chance.randrange(48, 260), seed, "prefix", number) for number in range(PREFIXES)]
    number = 0
    while True:
        length = int(min(900, 8 + chance.expovariate(1 / 90)))
        tokens = prompt(length, seed, number)
        if chance.random() < 0.35:
            tokens = chance.choice(shared) + tokens
        yield Ask(
            number,
            tokens,
            count=chance.randrange(20, 80) if chance.random() < 0.2 else chance.randrange(1, 4),
            d_first=chance.random() < 0.5,
            in_turn=chance.random() < 0.2,
            patience=chance.uniform(0.0, 0.3) if chance.random() < 0.05 else None,
        )
        number += 1
