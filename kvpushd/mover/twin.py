# SPDX-License-Identifier: Apache-2.0
"""A mover as a thread of this process, over the fake transport: for tests of whoever uses a handle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading

from kvpushd.mover.handle import MoverHandle
from kvpushd.mover.link import Link, LinkClosed
from kvpushd.mover.mover import Mover
from kvpushd.mover.process import serve
from kvpushd.mover.transport.fake import FakeFabric, FakeTransport
from kvpushd.mover.transport.local import LocalCarrier


class MoverThread:
    """The Child of a handle: the same link, loop and commands as a mover's process, no process.

    `kill` closes the thread's end of the link, and all inlets with it: what a process's death does.
    """

    def __init__(self, fabric: FakeFabric, end: socket.socket) -> None:
        self._end = end
        self._link = Link(end)
        self._mover = Mover(LocalCarrier(), FakeTransport(fabric))
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    @classmethod
    async def spawn(cls, fabric: FakeFabric) -> MoverHandle:
        """A handle to a mover that runs as a thread; what it reaches is in `fabric`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = MoverHandle(Link(ours), cls(fabric, theirs))
        await handle.ready()
        return handle

    @property
    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    def begin(self) -> None:
        """Nothing: it serves as soon as it is made."""

    def kill(self) -> None:
        """Ends the thread's rounds at its next look at the link."""
        with contextlib.suppress(OSError):  # closed already: the thread has ended
            self._end.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> str:
        """Returns once the thread has ended."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        return "thread ended"

    def _run(self) -> None:
        try:
            with contextlib.suppress(LinkClosed):
                serve(self._link, self._mover)
        finally:
            self._mover.close()
            self._link.close()
