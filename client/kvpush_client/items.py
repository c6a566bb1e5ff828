# SPDX-License-Identifier: Apache-2.0
"""What an engine tells the daemon of its node: plain values, one for each item of a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from kvpush_client.events import Side, TransferKey
from kvpush_client.layout import Blocks, Layout

PROTOCOL = 1
"""The version of the session's protocol."""


class Role(Enum):
    """Which part of an engine a session speaks for."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the session speaks for. Sessions that agree on (engine_id, launch) are one engine."""

    engine_id: str
    launch: str
    role: Role
    rank: int = 0
    world_size: int = 1
    local_ranks: int = 1
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    software: str = ""
    process: bytes = field(default=b"", compare=False)
    """Made by the session, once: by it the daemon knows a process that comes again."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the daemon grants a session; `lease` in seconds."""

    incarnation: bytes
    lease: float
    peer_host: str
    peer_port: int
    software: str = ""


@dataclass(frozen=True, slots=True)
class Sender:
    """Where the engine that will send is: its id, and its daemon."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class DescribePool:
    """Worker: how the pool that went by fd.sock is cut."""

    pool_id: bytes
    layout: Layout


@dataclass(frozen=True, slots=True)
class Reserve:
    """Scheduler: these blocks wait for positions [start, end). `lease` in seconds, None = the daemon's."""

    key: TransferKey
    senders: tuple[Sender, ...]
    start: int
    end: int
    blocks: tuple[Blocks, ...]
    lease: float | None = None
    priority: int = 0
    label: str = ""
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The digest of what the positions below `end` are of."""

    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Handoff:
    """Scheduler: opens a handoff, appends blocks to it, seals it, or several of these."""

    key: TransferKey
    blocks: tuple[Blocks, ...]
    seal: int | None = None
    lease: float | None = None
    receiver_engine_id: str = ""
    label: str = ""
    prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True, slots=True)
class Advance:
    """Worker: positions below `positions` are final in layers [first_layer, end_layer) of its pool.

    `at` is when they became so, in CLOCK_MONOTONIC nanoseconds.
    """

    key: TransferKey
    positions: int
    first_layer: int = 0
    end_layer: int | None = None
    at: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Scheduler: takes a half back."""

    key: TransferKey
    side: Side
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    """Scheduler: the senders of this transfer need not send it."""

    key: TransferKey
    senders: tuple[Sender, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Scheduler: the first token came out at `unix_ns`."""

    key: TransferKey
    unix_ns: int


Item = DescribePool | Reserve | Handoff | Advance | Cancel | Decline | FirstToken


def merged(items: Iterable[Item]) -> list[Item]:
    """The same in fewer items: advances of one handoff that go on where the one before it ended are one."""
    said: list[Item] = []
    last: dict[TransferKey, int] = {}
    for item in items:
        if isinstance(item, Advance):
            place = last.get(item.key)
            before = None if place is None else said[place]
            both = _both(before, item) if isinstance(before, Advance) else None
            if place is not None and both is not None:
                said[place] = both
                continue
            last[item.key] = len(said)
        said.append(item)
    return said


def _both(before: Advance, item: Advance) -> Advance | None:
    """What two advances of one handoff say, where one can."""
    if (item.first_layer, item.end_layer) == (0, None) and item.positions >= before.positions:
        return item
    if item.positions == before.positions and item.first_layer == before.end_layer:
        return replace(item, first_layer=before.first_layer)
    return None


def half_of(item: Item) -> tuple[TransferKey, Side] | None:
    """The half that an item opens or appends to; None for all other items."""
    match item:
        case Reserve():
            return item.key, Side.RECEIVER
        case Handoff():
            return item.key, Side.SENDER
        case _:
            return None
