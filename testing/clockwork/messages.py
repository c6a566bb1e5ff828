# SPDX-License-Identifier: Apache-2.0
"""What a harness and its engines say to each other, over pipes within one user's processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from testing.clockwork.clock import Clock, Verify
from testing.clockwork.witness import Counts, Flip, Mismatch


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to fork. `arguments` are vLLM's EngineArgs; `env` is set before its config is made.

    It lives in the network namespace `namespace`, if that is given. `prepare` names "module:function"s that
    it calls before vLLM starts in it.
    """

    name: str
    log: str
    clockwork: bool
    arguments: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None
    prepare: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request. Not answered; `Progress` follows."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request. Not answered; `Progress` follows if it was still running."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskStats:
    """Answered with `Stats`, at once or, if `when_idle`, as soon as the engine has nothing left to do."""

    when_idle: bool = False


@dataclass(frozen=True, slots=True)
class Configure:
    """Replace what is given. Answered with None."""

    clock: Clock | None = None
    verify: Verify | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """Flip a byte. Answered with None."""

    flip: Flip


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Answered with whether vLLM did it: it does not while blocks are in use."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Call `module:function` with vLLM's EngineCore and `arguments`. Answered with what it returns."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """Shut the engine down and end. Not answered."""


Command = Submit | Abort | AskStats | Configure | Arm | ResetPrefixCache | Inspect | Exit


@dataclass(frozen=True, slots=True)
class Ask:
    """A command with the number that its answer carries."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is up; `seconds` since the fork."""

    seconds: float
    blocks: int


@dataclass(frozen=True, slots=True)
class Answer:
    """To an `Ask`: a value, or what went wrong."""

    number: int
    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A request got tokens, or ended, at `time` (CLOCK_MONOTONIC, seconds)."""

    request_id: str
    time: float
    token_ids: tuple[int, ...]
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None
    local_cached_tokens: int | None
    external_cached_tokens: int | None


Report = Ready | Answer | Progress


@dataclass(frozen=True, slots=True)
class Stats:
    """An engine between two steps.

    free_blocks: of vLLM's block pool, exactly. Of `blocks`, one is the null block and never free; cached
    blocks that nobody holds are free. steps: of the engine, those without a forward included. witness: summed
    over ranks (its steps: the highest); with another model all zero. preemptions: counted when the preempted
    request next emits. idle: vLLM's own busy loop would sleep. cpu_seconds, rss_bytes: of the engine's
    process, without those of its ranks if they are several.
    """

    steps: int
    witness: Counts
    mismatches: tuple[Mismatch, ...]
    free_blocks: int
    blocks: int
    preemptions: int
    running: int
    waiting: int
    idle: bool
    cpu_seconds: float
    rss_bytes: int
