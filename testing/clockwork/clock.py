# SPDX-License-Identifier: Apache-2.0
"""How long the clockwork model pretends to compute."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Verify = Literal["full", "first", "off"]
"""full: every cell of the context at each step. first: each cell the first time a request reads it, and one
earlier block in turn at each step, for benchmarks. off: nothing."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Pretended times, in seconds. All zero: as fast as the machine goes.

    A step takes `seconds_per_prompt_token` for each token of each request that computes more than one, plus
    `seconds_per_step` if any request computes a single one, spread evenly over the layers and waited for
    without the GIL. `host_seconds_per_step` is burnt first, with the GIL held, as an engine's Python is.
    """

    seconds_per_prompt_token: float = 0.0
    seconds_per_step: float = 0.0
    host_seconds_per_step: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 <= value < 3600.0:
                raise ValueError(f"{name} is {value}; it must be between 0 and an hour")

    def duration(self, token_counts: list[int]) -> float:
        """What a step takes that computes so many tokens for each of its requests."""
        prompt = sum(count for count in token_counts if count > 1)
        single = any(count == 1 for count in token_counts)
        return prompt * self.seconds_per_prompt_token + single * self.seconds_per_step


@dataclass(frozen=True, slots=True)
class Works:
    """The "clockwork" entry of a model's config.json.

    `window` tokens is what a sliding layer sees; of every `full_every` layers the last one is full, the
    others slide. Without a window all layers are full.
    """

    clock: Clock = field(default_factory=Clock)
    verify: Verify = "full"
    window: int | None = None
    full_every: int = 1

    def __post_init__(self) -> None:
        if self.verify not in get_args(Verify):
            raise ValueError(f"verify is {self.verify!r}; it must be one of {get_args(Verify)}")
        if self.full_every < 1 or (self.window is not None and self.window < 1):
            raise ValueError("full_every and window must be at least 1")

    def window_of(self, layer: int) -> int | None:
        """The window of a layer in tokens, None if it sees everything."""
        if self.window is None or layer % self.full_every == self.full_every - 1:
            return None
        return self.window

    def to_json(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Works":
        """The inverse of `to_json`; what is missing takes its default.

        Raises TypeError or ValueError on an unknown or impossible entry.
        """
        entries = dict(value)
        return cls(clock=Clock(**entries.pop("clock", {})), **entries)
