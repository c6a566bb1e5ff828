# SPDX-License-Identifier: Apache-2.0
"""Children of the demo: started in groups of their own, awaited, and all gone in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvpushctl.errors import CommandError

MARK = "KVPUSH_DEMO"
"""In the environment of every child, and so of every grandchild: by it none is overlooked."""

# Becomes the child's program, once it has asked for SIGTERM (15) when the parent dies (PR_SET_PDEATHSIG, 1).
# A program of its own and no preexec_fn: gRPC has threads here, so nothing may run between fork and exec.
_LAUNCH = (
    sys.executable,
    *("-I", "-S", "-c"),
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)\n"
    "parent, *argv = sys.argv[1:]\n"
    "os.getppid() == int(parent) or sys.exit(1)\n"
    "os.execv(argv[0], argv)\n",
)
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.1

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Child:
    """A process that leads a group of its own."""

    name: str
    process: Process
    log: Path

    def tail(self, lines: int = 15) -> str:
        """The end of what it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raises CommandError, with the end of its log, if it has ended badly."""
        if self.process.returncode not in (None, 0):
            raise CommandError(
                f"{self.name} ended with status {self.process.returncode}; the end of its log:\n{self.tail()}"
            )

    async def until(self, what: str, look: Callable[[], Awaitable[Found | None]], seconds: float) -> Found:
        """What `look` finds, asked again and again while the child lives and `seconds` last.

        Raises CommandError if it ends before, or the time is over.
        """
        try:
            async with asyncio.timeout(seconds):
                while (found := await look()) is None:
                    self.check()
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise CommandError(
                f"{self.name}: {what} did not come within {seconds:g} s; the end of its log:\n{self.tail()}"
            ) from None
        return found

    async def end(self, seconds: float) -> None:
        """Waits for its end. Raises CommandError if it ends badly or not in time."""

        async def ended() -> bool | None:
            return True if self.process.returncode == 0 else None

        await self.until("its end", ended, seconds)


class Processes:
    """Starts children; `stop` ends them and whatever they started."""

    def __init__(self, logs: Path, env: Mapping[str, str], mark: str) -> None:
        """`logs` is a folder for what they write, `mark` what only children of this demo bear."""
        self._logs = logs
        self._env = {**env, MARK: mark}
        self._children: list[Child] = []

    async def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> Child:
        """A child whose output goes to a log of its own. It is told to end if this process dies."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *_LAUNCH,
                str(os.getpid()),
                *argv,
                env={**self._env, **(env or {})},
                stdin=DEVNULL if stdin is None else PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
        return child

    async def stop(self, grace: float = 20.0) -> list[str]:
        """Ends all and whatever they started; returns the names of those that had to be killed.

        First by SIGTERM to their groups, so that they can clean up; after `grace` seconds, or once their
        leaders have ended, what is left by SIGKILL.
        """
        for child in reversed(self._children):
            _signal_group(child.process.pid, signal.SIGTERM)
        late: list[str] = []
        try:
            if not await _until(lambda: not any(map(_group_lives, self._pids())), grace):
                late = [child.name for child in self._children if _group_lives(child.process.pid)]
        finally:
            self._kill()
        await asyncio.gather(*(child.process.wait() for child in self._children))
        await _until(lambda: not self._strays(), _KILL_SECONDS)
        return late

    def _kill(self) -> None:
        for pid in self._pids():
            _signal_group(pid, signal.SIGKILL)
        for pid in self._strays():
            _signal(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def _strays(self) -> list[int]:
        """Living processes that carry our mark, whatever group they are in."""
        mark = f"{MARK}={self._env[MARK]}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # another user's, or it has just ended
            if mark in environment.split(b"\0"):
                found.append(int(entry.name))
        return found


async def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not true():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
