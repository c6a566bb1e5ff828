# SPDX-License-Identifier: Apache-2.0
"""What processes hold of the kernel, over time, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.node import Node

MEASURES = ("resident_bytes", "descriptors", "threads")
HANDLES = ("outlets", "transfers", "registrations")
"""The same of movers: what they have of their transport."""
WARM_UP = 0.3
"""Share of a run that is not looked at: caches and histories fill up."""
ALLOWED: Mapping[str, float] = {
    "descriptors": 2.0,
    "threads": 2.0,
    "outlets": 0.5,
    "transfers": 1.0,
    "registrations": 0.5,
}
"""Growth over the rest of the run that is none, by measure; for memory see ALLOWED_MEMORY."""
ALLOWED_MEMORY = 0.03
"""As a share of what is resident: what an allocator's pages come and go by."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process, `at` seconds after the begin."""

    at: float
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Held:
    """One look at what a mover has of its transport."""

    at: float
    outlets: int
    transfers: int
    registrations: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A measure of a process after the warm-up: its median, and by how much its trend rises to the end."""

    process: str
    measure: str
    median: float
    growth: float

    @property
    def flat(self) -> bool:
        """It does not rise by more than is allowed."""
        return self.growth <= ALLOWED.get(self.measure, ALLOWED_MEMORY * self.median)


class Meters:
    """Samples of all processes, by name, and of what movers have of their transports."""

    def __init__(self, pids: Mapping[str, int], nodes: Mapping[str, Node] | None = None) -> None:
        """`nodes` are those whose movers are asked, by the mover's name."""
        self._pids = dict(pids)
        self._nodes = dict(nodes or {})
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}
        self.handles: dict[str, list[Held]] = {name: [] for name in self._nodes}

    def look(self, at: float) -> None:
        """One sample of each. Raises FileNotFoundError where a process is gone."""
        for name, pid in self._pids.items():
            self.samples[name].append(sample(pid, at))
        for name, node in self._nodes.items():
            mover = node.status().movers[0]
            self.handles[name].append(Held(at, mover.outlets, mover.transfers, mover.registrations))

    def growths(self) -> list[Growth]:
        """Of every process and measure."""
        found = [
            growth(name, measure, samples) for name, samples in self.samples.items() for measure in MEASURES
        ]
        found += [growth(name, measure, held) for name, held in self.handles.items() for measure in HANDLES]
        return found


def sample(pid: int, at: float) -> Sample:
    """A look at one process."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return Sample(at, resident, len(os.listdir(f"/proc/{pid}/fd")), threads)


def growth(process: str, measure: str, samples: Sequence[Sample] | Sequence[Held]) -> Growth:
    """How much a measure grows from the end of the warm-up to the end, by the median of all slopes: no single
    peak counts (Theil and Sen). Raises ValueError with fewer than three samples after the warm-up."""
    late = [one for one in samples if one.at >= WARM_UP * samples[-1].at]
    if len(late) < 3:
        raise ValueError(f"{process} has only {len(late)} samples after the warm-up")
    points = [(one.at, float(getattr(one, measure))) for one in late]
    slopes = [
        (y2 - y1) / (x2 - x1)
        for number, (x1, y1) in enumerate(points)
        for x2, y2 in points[number + 1 :]
        if x2 > x1
    ]
    median = statistics.median(y for _, y in points)
    return Growth(process, measure, median, statistics.median(slopes) * (points[-1][0] - points[0][0]))
