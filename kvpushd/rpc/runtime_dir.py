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
from kvpushd.rpc.file import File

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
        self._files: list[File] = []

    async def own(self, patience: float = LOCK_PATIENCE) -> int:
        """Makes the directory and takes its lock; returns the descriptor that holds it.

        Movers inherit the descriptor, so the lock is free only once a former daemon and all of its movers are
        dead, and nothing of theirs can write any more. Waits `patience` seconds for that, unless a daemon
        answers. Raises ConfigError where another has it, or the directory can't be written.
        """
        deadline = time.monotonic() + patience
        lock = self._open_lock()
        while not _locked(lock):
            if time.monotonic() > deadline or self._somebody_answers():
                os.close(lock)
                raise ConfigError(
                    f"another kvpushd runs in {self.path}: stop it, or choose another runtime_dir"
                )
            await asyncio.sleep(0.02)
        file = File.of(self.path / "lock", os.fstat(lock))
        if file.is_there():
            self._files = [file]
            return lock
        # It was removed since it was opened, and keeps nobody else out.
        os.close(lock)
        return await self.own(patience)

    def _open_lock(self) -> int:
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"runtime_dir {self.path}: {error.strerror}; choose another, or make it"
            ) from error

    @property
    def lock(self) -> bytes:
        """Names the lock that is owned: no other that is held has the same name."""
        lock = self._files[0]
        return b"%d:%d" % (lock.device, lock.inode)

    def keep(self, file: File) -> File:
        """Notes a socket's file, to be missed once it is gone; returns it."""
        self._files.append(file)
        return file

    def problem(self) -> str | None:
        """What became of a directory that is owned: None as long as its lock and all that was kept are there.

        Where they were removed, engines don't find this daemon any more, and another one may have the lock
        that is there now.
        """
        for file in self._files:
            if not file.is_there():
                return f"{file.path} was removed or replaced: engines and kvpushctl do not find this daemon"
        return None

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


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
