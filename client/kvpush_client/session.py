# SPDX-License-Identifier: Apache-2.0
"""One process's life with the kvpushd of its node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvpush_client.events import Event, Side, TransferKey
from kvpush_client.layout import Blocks, Layout
from kvpush_client.pool import Pool


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
    fingerprint: Mapping[str, str] = ...
    software: str = ""


@dataclass(frozen=True, slots=True)
class Sender:
    """Where the engine that will send is: its id, and its daemon."""

    engine_id: str
    host: str
    port: int


class Session:
    """Connects in the background, stays connected, registers again by itself.

    No method but `wait_ready` and `close` blocks, and none raises because the daemon is away: what was
    asked for then ends by an event, as anything else that goes wrong.
    """

    def __init__(self, runtime_dir: Path, identity: Identity, pool: Pool | None = None, layout: Layout | None = None): ...
    def start(self) -> None: ...
    def wait_ready(self, timeout: float) -> None: ...
    @property
    def ready(self) -> bool: ...
    def poll(self) -> list[Event]: ...
    def reserve(self, key: TransferKey, senders: Sequence[Sender], start: int, end: int, blocks: Sequence[Blocks],
                *, lease: float | None = None, priority: int = 0, label: str = "") -> None: ...
    def handoff(self, key: TransferKey, blocks: Sequence[Blocks], *, seal: int | None = None,
                lease: float | None = None, receiver_engine_id: str = "", label: str = "") -> None: ...
    def advance(self, key: TransferKey, positions: int, *, first_layer: int = 0, end_layer: int | None = None) -> None: ...
    def cancel(self, key: TransferKey, side: Side, detail: str = "") -> None: ...
    def decline(self, key: TransferKey, senders: Sequence[Sender]) -> None: ...
    def first_token(self, key: TransferKey) -> None: ...
    def close(self) -> None: ...
