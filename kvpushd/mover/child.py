# SPDX-License-Identifier: Apache-2.0
"""A mover's process as the daemon sees it: started, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpushd.mover import lanes
from kvpushd.mover.link import Link


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """How a mover is started.

    `agent` names its sending agent, unique among all peers and for ever. `ucx_tls` and `net_devices` are
    UCX's variables of these names; `environment` is added last. `fault` is one of process.FAULTS,
    `verify` of process.VERIFY. `module` is what runs, `process.main` or what calls it.
    """

    agent: str
    ucx_tls: str = "tcp,self"
    net_devices: str = "all"
    environment: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None
    verify: str = "off"
    module: str = "kvpushd.mover"


class Child(Protocol):
    """Whatever runs at the other end of a link: a spare, and, once it was told to begin, a mover."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def begin(self) -> None:
        """Makes a mover of it, soon; harmless to repeat, or where it is no more."""
        ...

    def kill(self) -> None:
        """Ends it, soon; harmless to repeat."""
        ...

    async def wait(self) -> str:
        """Returns once it is no more, saying how it ended."""
        ...


StartMover = Callable[[MoverSettings, Sequence[int]], tuple[Link, Child]]
"""Starts a spare that inherits some descriptors, as MoverProcess.start does."""


class MoverProcess:
    """A child process. `wait` returns only when the kernel has taken it down: nothing of it runs any more."""

    def __init__(self, process: subprocess.Popen[bytes], settings: MoverSettings) -> None:
        self._process = process
        self._settings = settings
        # A pidfd and not SIGCHLD: it names this process for ever, and needs no handler in the daemon.
        self._pidfd = os.pidfd_open(process.pid)
        self._reaping: asyncio.Task[str] | None = None

    @classmethod
    def start(cls, settings: MoverSettings, pass_fds: Sequence[int] = ()) -> tuple[Link, MoverProcess]:
        """Starts a spare; it inherits `pass_fds` and holds them open as long as it, or its mover, lives.

        Call it from a thread that outlives the mover: the kernel kills the child with the thread.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-P", "-m", settings.module]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--agent", settings.agent]
        if settings.verify != "off":
            command += ["--verify", settings.verify]
        if settings.fault is not None:
            command += ["--fault", settings.fault]
        with theirs:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,  # what makes a mover of it
                stdout=2,  # NIXL logs to stdout, which is nobody's data here
                env=_environment(settings),
                pass_fds=(theirs.fileno(), *pass_fds),
            )
        return Link(ours), cls(process, settings)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def begin(self) -> None:
        """Says so on its stdin."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(b"\n")
            stdin.close()

    def kill(self) -> None:
        """Sends SIGKILL, unless it is gone."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> str:
        """Returns once it is reaped, saying how it ended; any number of callers."""
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(self._reap())
        return await asyncio.shield(self._reaping)

    async def _reap(self) -> str:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            loop.remove_reader(self._pidfd)  # it stays readable for ever
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(self._pidfd, end)
        await ended
        status = self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        if self._process.stdin is not None:
            self._process.stdin.close()
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        if status == os.EX_CONFIG:
            ucx = self._settings
            return (
                f"its transport does not start with ucx.tls = {ucx.ucx_tls!r}, "
                f"ucx.net_devices = {ucx.net_devices!r}, ucx.env = {dict(ucx.environment)!r}"
            )
        return f"exit status {status}"


def _environment(settings: MoverSettings) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("NIXL_LOG_LEVEL", "WARN")
    # numpy's BLAS would start a thread per core, with its memory, for nothing.
    environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
    environment.setdefault("UCX_LOG_LEVEL", lanes.LEVEL)
    environment["UCX_TLS"] = settings.ucx_tls
    environment["UCX_NET_DEVICES"] = settings.net_devices
    environment.update(settings.environment)
    return environment
