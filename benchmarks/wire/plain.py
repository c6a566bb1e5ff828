# SPDX-License-Identifier: Apache-2.0
"""Floors: a TCP socket between two processes, and a copy in one. Both move the pool whole, whatever the case.

python -m benchmarks.wire.plain POOL    the receiving end of the socket
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.child import Child
from benchmarks.wire import case as cases
from benchmarks.wire.case import POOL_BYTES, Case
from benchmarks.wire.contender import WrongBytes
from benchmarks.wire.memory import Memory

PIECE = 1 << 20


class Socket:
    """This process sends."""

    name = "TCP socket"

    def __init__(self, memory: Memory, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.wire.plain", memory.paths["receiver"]]
        self._child = Child(command, folder / "socket.log")
        self._connection = socket.create_connection(("127.0.0.1", self._child.hear()["port"]))
        self._source = memoryview(cases.mapped(memory.paths["sender"]).data)

    @property
    def pids(self) -> Sequence[int]:
        """The receiver, and this process."""
        return [self._child.pid, os.getpid()]

    def turn(self, case: Case) -> float:
        """Sends; the receiver answers once it has all."""
        begun = time.monotonic()
        sent = 0
        while sent < POOL_BYTES:
            sent += self._connection.send(self._source[sent : sent + PIECE])
        self._connection.recv(1)
        return time.monotonic() - begun

    def check(self, case: Case) -> None:
        """Raises WrongBytes."""
        if not self._child.ask("check")["right"]:
            raise WrongBytes("TCP socket: the target does not hold what was sent")

    def close(self) -> None:
        """Ends the receiver."""
        self._connection.close()
        self._child.close()


class Memcpy:
    """What one core copies."""

    name = "memcpy"

    def __init__(self, memory: Memory) -> None:
        self._source, self._target = (cases.mapped(path) for path in memory.paths.values())

    @property
    def pids(self) -> Sequence[int]:
        """This process."""
        return [os.getpid()]

    def turn(self, case: Case) -> float:
        """Copies."""
        begun = time.monotonic()
        np.copyto(self._target, self._source)
        return time.monotonic() - begun

    def check(self, case: Case) -> None:
        """A copy is right."""

    def close(self) -> None:
        """Nothing to end."""


def receive(path: str) -> None:
    """The socket's receiving end: takes a pool's worth and says ".", or answers on its standard input."""
    pool = cases.mapped(path)
    view = memoryview(pool.data)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        connection = listener.accept()[0]
    with connection:
        while True:
            asked, _, _ = select.select([connection, sys.stdin], [], [])
            if sys.stdin in asked:
                if not sys.stdin.readline():
                    return
                print(json.dumps({"right": cases.arrived(pool, "contiguous", PIECE)}), flush=True)
                pool[:] = 1
                continue
            got = 0
            while got < POOL_BYTES:
                count = connection.recv_into(view[got : got + PIECE])
                if count == 0:
                    return
                got += count
            connection.send(b".")


if __name__ == "__main__":
    receive(sys.argv[1])
