# SPDX-License-Identifier: Apache-2.0
"""A daemon's runtime directory: the lock that makes it the only one there, and its three sockets."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import stat
import time
from pathlib import Path

from kvpushd.errors import ConfigError

LOCK_PATIENCE = 10.0
"""Seconds that a former daemon's movers may take to die."""


class RuntimeDir:
    """Where engines and kvpushctl find a daemon; in it, whoever is in `group` may write to the sockets."""

    def __init__(self, path: Path, group: str = "") -> None:
        """`group` is one that exists; empty = the daemon's own."""
        self.path = path
        self.engines = path / "kvpushd.sock"
        self.memory = path / "fd.sock"
        self.admin = path / "admin.sock"
        self._group = group

    async def own(self, patience: float = LOCK_PATIENCE) -> int:
        """Makes the directory and takes its lock; returns the descriptor that holds it.

        Movers inherit the descriptor, so the lock is free only once a former daemon and all of its movers are
        dead, and nothing of theirs can write any more. Waits `patience` seconds for that, unless a daemon
        answers. Raises ConfigError where another has it, or the directory can't be written.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"runtime_dir {self.path}: {error.strerror}; choose another, or make it"
            ) from error
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline or self._somebody_answers():
                    os.close(lock)
                    raise ConfigError(
                        f"another kvpushd runs in {self.path}: stop it, or choose another runtime_dir"
                    ) from None
                await asyncio.sleep(0.02)

    def let_in(self) -> None:
        """Gives the group the directory, unless all may enter it. Raises ConfigError.

        Before there are sockets: who looks for them then sees that there are none yet.
        """
        if not self.path.stat().st_mode & stat.S_IXOTH:
            self._give(self.path)

    def hand_over(self) -> None:
        """Gives the group the sockets. Raises ConfigError."""
        self._give(self.engines, self.memory, self.admin)

    def _give(self, *paths: Path) -> None:
        for path in paths if self._group else ():
            try:
                shutil.chown(path, group=self._group)
            except OSError as error:
                raise ConfigError(
                    f"socket_group: can't give {path} to {self._group!r}: {error.strerror}; the daemon's "
                    "user must own it and be in that group (SupplementaryGroups= in the unit)"
                ) from error

    def _somebody_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as tried:
            return tried.connect_ex(str(self.engines)) == 0
