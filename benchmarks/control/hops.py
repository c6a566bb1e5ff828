# SPDX-License-Identifier: Apache-2.0
"""Where the time of a landing goes: when its engines said and heard it, and what the daemons noted of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.report.statistics import percentile
from kvpush_client.events import TransferKey
from testing.node import Node

HOPS = ("engine to daemon", "daemon to mover, written", "daemon to daemon", "daemon to engine")


@dataclass(frozen=True, slots=True)
class Landing:
    """A handoff and its landing at the receiver's client, on this process's monotonic clock, in seconds."""

    key: TransferKey
    begun: float
    heard: float

    @property
    def seconds(self) -> float:
        """From the one to the other."""
        return self.heard - self.begun


def medians(landings: Sequence[Landing], sender: Node, receiver: Node) -> Iterator[tuple[str, float]]:
    """Each hop's name and its median in seconds. All processes are of one host, and so is their clock."""
    unix = time.time() - time.monotonic()
    each = [_hops(landing, unix, sender, receiver) for landing in landings]
    for hop, took in zip(HOPS, zip(*each, strict=True), strict=True):
        yield hop, percentile(took, 50)


def _hops(landing: Landing, unix: float, sender: Node, receiver: Node) -> list[float]:
    name = landing.key.transfer_id
    (sent,), (received,) = sender.transfers(name), receiver.transfers(name)
    moments = [
        landing.begun + unix,
        sent.times.sealed_unix_ns / 1e9,
        sent.times.landed_unix_ns / 1e9,
        received.times.landed_unix_ns / 1e9,
        landing.heard + unix,
    ]
    return [later - earlier for earlier, later in itertools.pairwise(moments)]
