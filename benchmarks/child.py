# SPDX-License-Identifier: Apache-2.0
"""A process of a benchmark, told what to do in JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Child:
    """Answers are lines that begin with a brace: libraries log to the standard output too.

    Its standard error goes to a log, if there is one. Used as a context it ends with it.
    """

    def __init__(
        self, command: Sequence[str], log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with contextlib.ExitStack() as stack:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log is None else stack.enter_context(log.open("ab")),
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
        said = self._log.read_text(errors="replace").splitlines()[-3:] if self._log else []
        raise RuntimeError(
            f"{self._process.args!r:.60} ended with status {self._process.wait()}: {' / '.join(said)}"
        )

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
