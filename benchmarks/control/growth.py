# SPDX-License-Identifier: Apache-2.0
"""What one more open reservation, and one more peer, costs a node that has many already."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.control.pair import Pair

WAVE = 100
"""Reservations that are opened at a time, however many there are."""
PEERS_WAVE = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """What there is more and more of, and between which counts the cost of one more is compared."""

    name: str
    early: tuple[int, int]
    late: tuple[int, int]
    host: str
    add: Callable[[Pair, int, int], None]
    """Makes what there is of it on a pair grow from one count to another."""


def _open(pair: Pair, have: int, want: int) -> None:
    for at in range(have, want, WAVE):
        pair.open(min(WAVE, want - at))


def _link(pair: Pair, have: int, want: int) -> None:
    for at in range(have, want, PEERS_WAVE):
        # All of 127.0.0.0/8 is this machine: each address is a peer of its own, by one and the same process.
        pair.link([f"127.0.1.{number}" for number in range(at, min(at + PEERS_WAVE, want))])


RESERVATIONS = Kind("reservations", (100, 1_000), (5_000, 10_000), "127.0.0.1", _open)
PEERS = Kind("peers", (16, 64), (128, 256), "0.0.0.0", _link)


def measure(kind: Kind, spans: Sequence[tuple[int, int]], folder: Path) -> list[Mapping[str, float]]:
    """For each span, in order, what one more costs on fresh nodes: CPU and memory of daemons and movers."""
    found = []
    with Pair(folder, 2048, kind.host) as pair:
        have = 0
        for start, end in spans:
            kind.add(pair, have, start)
            before, cpu, wall = pair.node_bytes(), pair.node_cpu_s(), time.monotonic()
            kind.add(pair, start, end)
            have, items = end, end - start
            found.append(
                {
                    "cpu_s": (pair.node_cpu_s() - cpu) / items,
                    "wall_s": (time.monotonic() - wall) / items,
                    "memory_bytes": (pair.node_bytes() - before) / items,
                }
            )
    return found
