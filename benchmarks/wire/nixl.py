# SPDX-License-Identifier: Apache-2.0
"""Raw NIXL in two processes, with whatever settings are asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.child import Child
from benchmarks.wire.case import RUNS, TRANSPORTS, Case
from benchmarks.wire.contender import WrongBytes
from benchmarks.wire.memory import Memory


@dataclass(frozen=True, slots=True)
class Setting:
    """How raw NIXL is used.

    merged      runs are sorted and merged before they are named; else named one by one, in their order,
                by initialize_xfer, which merges nothing
    nap         seconds between two polls, on both sides; 0 spins
    pieces      transfers that the bytes are cut into, all posted at once
    threads     of NIXL's backend
    prepared    descriptor lists of the whole pool are made beforehand, and named by index
    """

    merged: bool = True
    nap: float = 0.0
    pieces: int = 1
    threads: int = 0
    prepared: bool = False

    def __str__(self) -> str:
        words = ["merged" if self.merged else "unmerged"]
        if self.prepared:
            words.append("prepared lists")
        if self.pieces > 1:
            words.append(f"{self.pieces} transfers")
        if self.threads:
            words.append(f"{self.threads} threads")
        return ", ".join([*words, f"polls each {self.nap * 1e6:.0f} us" if self.nap else "spins"])


UNMERGED = (Setting(merged=False), Setting(merged=False, nap=100e-6))
SETTINGS = (
    Setting(),
    Setting(pieces=4),
    Setting(nap=20e-6),
    Setting(nap=100e-6),
    Setting(nap=300e-6),
    Setting(nap=1e-3),
    Setting(nap=100e-6, prepared=True),
    Setting(nap=100e-6, threads=1),
)


class Nixl:
    """Two processes per transport, each with an agent per number of threads that a setting names."""

    def __init__(self, memory: Memory, transport: str, folder: Path) -> None:
        environment = {
            "UCX_TLS": TRANSPORTS[transport],
            "NIXL_LOG_LEVEL": "WARN",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._ends = [
            Child(
                [sys.executable, "-m", "benchmarks.wire.nixl_end", role, path],
                folder / f"nixl-{transport}-{role}.log",
                environment,
            )
            for role, path in memory.paths.items()
        ]
        self._sender, self._receiver = self._ends
        # The receiver has to make progress for a connection to come about.
        self._sender.ask("meet", **self._receiver.ask("introduce"))
        for setting in SETTINGS:
            # The first write of an agent connects it.
            self.write(Case(transport, "contiguous", RUNS[-1]), setting)

    @property
    def pids(self) -> Sequence[int]:
        """Both."""
        return [end.pid for end in self._ends]

    def write(self, case: Case, setting: Setting) -> float:
        """Seconds of a pool's worth of runs."""
        arguments = {"shape": case.shape, "run": case.run, **asdict(setting)}
        # What can be made beforehand is no part of the turn.
        self._sender.ask("prepare", **arguments)
        self._receiver.tell("poll", nap=setting.nap, threads=setting.threads)
        took = self._sender.ask("write", **arguments)
        self._receiver.ask("stop")
        return float(took["seconds"])

    def check(self, case: Case) -> None:
        """Raises WrongBytes."""
        if not self._receiver.ask("check", shape=case.shape, run=case.run)["right"]:
            raise WrongBytes(f"raw NIXL, {case.name}: the target does not hold what was sent")

    def close(self) -> None:
        """Ends both."""
        for end in self._ends:
            end.close()


class RawNixl:
    """A setting of it, as a contender."""

    def __init__(self, name: str, nixl: Nixl, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        self._nixl = nixl

    @property
    def pids(self) -> Sequence[int]:
        """Both ends."""
        return self._nixl.pids

    def turn(self, case: Case) -> float:
        """As the setting says."""
        return self._nixl.write(case, self.setting)

    def check(self, case: Case) -> None:
        """Raises WrongBytes."""
        self._nixl.check(case)

    def close(self) -> None:
        """Nothing: its processes are others' too."""
