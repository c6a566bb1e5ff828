# SPDX-License-Identifier: Apache-2.0
"""A process of a contender, told what to do in JSON lines; and what processes cost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.wire.case import Case


class WrongBytes(RuntimeError):
    """A target pool does not hold what was sent."""


class Contender(Protocol):
    """Whoever moves bytes."""

    name: str

    def turn(self, case: Case) -> float:
        """Moves a pool's worth; returns the seconds. Its processes have nothing to do before and after."""

    def check(self, case: Case) -> None:
        """Raises WrongBytes where the last turn left other bytes than it should have."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes whose CPU time is its own."""

    def close(self) -> None:
        """Ends what it started."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of processes, all threads, to the nanosecond."""
    # The kernel's clock id of a process's CPU time, as clock_getcpuclockid(3) makes it.
    return sum(time.clock_gettime(((~pid) << 3) | 2) for pid in pids)


class Child:
    """Answers are lines that begin with a brace: libraries log to the standard output too."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, do: str, **arguments: Any) -> None:
        """Says what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next answer. Raises RuntimeError with the end of its log where it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        tail = " / ".join(self._log.read_text(errors="replace").splitlines()[-3:])
        raise RuntimeError(f"{self._process.args!r:.60} ended with status {self._process.wait()}: {tail}")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Both."""
        self.tell(do, **arguments)
        return self.hear()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
