# SPDX-License-Identifier: Apache-2.0
"""Memory that an engine shares with the kvpushd of its node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Since Linux 5.14; the standard library does not name it.
_MADV_POPULATE_WRITE = 23


class Pool:
    """One rank's KV memory: a sealed memfd, mapped here, of which the daemon gets the descriptor.

    Sealed means that its size is fixed for ever, so that nobody can make the daemon's mover fault on it. All
    zeros at first.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over `fd`, which must be at least `nbytes` long; `create` is the usual way."""
        self._fd = fd
        self._nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int, name: str, *, huge_pages: bool = False) -> Pool:
        """A new pool of `nbytes` bytes; `name` shows in /proc/PID/maps.

        `huge_pages` is advice, which a kernel may not follow. Raises ValueError where nbytes is not positive,
        OSError where the system has no memory or no descriptors left.
        """
        if nbytes <= 0:
            raise ValueError(f"a pool of {nbytes} bytes: it must hold at least one byte")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            pool = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        if huge_pages:
            # Kernels without huge pages for shared memory say EINVAL: the pool works as well without.
            with contextlib.suppress(OSError):
                pool._map.madvise(mmap.MADV_HUGEPAGE)
        return pool

    @property
    def fd(self) -> int:
        """The descriptor; the pool's until `close`."""
        return self._fd

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def view(self) -> memoryview:
        """The bytes, writable; `torch.frombuffer(pool.view, dtype=torch.int8)` shares them."""
        return self._view

    def prefault(self) -> None:
        """Touches every page, so that all are charged to this process's cgroup and lie on its NUMA node.

        Contents stay as they are. Raises OSError where memory is short. Before anyone else writes, please: on
        kernels older than 5.14 each page is touched by writing back what was read.
        """
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the kernel does not know this advice
                raise
            for page in range(0, self._nbytes, mmap.PAGESIZE):
                self._map[page] = self._map[page]

    def close(self) -> None:
        """Lets go of the descriptor and the mapping; harmless to repeat.

        Where a tensor still uses `view`, the mapping lives exactly as long as the tensor.
        """
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        # BufferError says that somebody holds the view; the last holder's end unmaps.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
