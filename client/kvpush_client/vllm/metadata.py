# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector tell each other through vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvpush_client.events import Fault, TransferKey


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a handoff is final around a step: positions below `before` already, below `after` with it."""

    key: TransferKey
    before: int
    after: int


@dataclass(slots=True)
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, with each step.

    waits     reservations made in this step, and the request that waits for each
    ends      reservations that ended, with the fault if any: for workers that have not heard it themselves
    progress  handoffs that this step moves
    """

    waits: list[tuple[TransferKey, str]] = field(default_factory=list)
    ends: list[tuple[TransferKey, Fault | None]] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Workers to scheduler, once: what their KV means, which only they know in full."""

    fingerprint: Mapping[str, str]
