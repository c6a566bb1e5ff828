# SPDX-License-Identifier: Apache-2.0
"""Host memory that an engine offers: what is accepted, and how a mover maps it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray

from kvpushd.errors import BadMemory

Bytes = NDArray[np.uint8]

_REQUIRED = {
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
}
# F_SEAL_FUTURE_WRITE (Linux 5.1) has no name in the standard library.
_READ_ONLY = fcntl.F_SEAL_WRITE | 0x0010

_MAP_NORESERVE = 0x4000  # in the standard library from 3.12 on
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; nor has this one


def accept(fd: int, nbytes: int, peer_uid: int) -> None:
    """Checks a descriptor that an engine with user id `peer_uid` offers as a pool of `nbytes` bytes.

    The descriptor stays the caller's. Raises BadMemory: not a memfd, unsealed, short, read-only, foreign.
    A seal can't be taken back, so what was checked stays true.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadMemory(f"the descriptor is a {_kind(status.st_mode)}, expected a memfd: offer a Pool's fd")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise BadMemory(
            "the descriptor is a file that can't be sealed, expected a memfd: its owner could truncate it "
            "and so kill the mover; offer a Pool's fd"
        ) from None
    missing = [name for name, bit in _REQUIRED.items() if not seals & bit]
    if missing:
        raise BadMemory(
            f"the memfd lacks {', '.join(missing)}: its owner could truncate it and so kill the mover; "
            "create it with MFD_ALLOW_SEALING and seal it before offering it"
        )
    if status.st_uid != peer_uid:
        raise BadMemory(
            f"the memfd belongs to user {status.st_uid}, but the engine runs as user {peer_uid}: an engine "
            "may offer only memory that it made itself"
        )
    if nbytes <= 0 or status.st_size < nbytes:
        raise BadMemory(
            f"the memfd is {status.st_size:,} bytes, but the pool was offered as {nbytes:,}: offer the size "
            "that the memfd was made with"
        )
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode != os.O_RDWR or seals & _READ_ONLY:
        raise BadMemory("the memfd can't be written to, expected O_RDWR and no F_SEAL_WRITE: KV lands in it")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFSOCK: "socket",
        stat.S_IFIFO: "pipe",
        stat.S_IFDIR: "directory",
        stat.S_IFCHR: "character device",
        stat.S_IFBLK: "block device",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


class Mapping:
    """A pool as this process sees it: `nbytes` bytes from `address`, until `close`."""

    __slots__ = ("_map", "address", "nbytes")

    def __init__(self, memory: mmap.mmap) -> None:
        self._map = memory
        self.nbytes = len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    @property
    def view(self) -> memoryview:
        """The bytes. Release it before `close`."""
        return memoryview(self._map)

    def populate(self, begin: int, nbytes: int) -> bool:
        """Fills in the page tables for `nbytes` from `begin`, both multiples of the page size or at the end.

        Without it the first write to each page faults: a first local copy took four times the next one's.
        Contents stay. False where the kernel can't (before 5.14), or memory is short: nothing is lost.
        """
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, begin, min(nbytes, self.nbytes - begin))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Unmaps. Whoever may still touch the memory must have been fenced: afterwards it is a SIGSEGV."""
        self._map.close()


def map_memory(fd: int, nbytes: int) -> Mapping:
    """Maps the first `nbytes` bytes of an accepted descriptor, shared and writable.

    The descriptor stays the caller's and may be closed. Raises BadMemory where the system refuses.
    """
    return _mapped(fd, nbytes, mmap.MAP_SHARED)


def anonymous(nbytes: int) -> Mapping:
    """Private memory of this process, none of which is there before it is written to.

    Raises BadMemory where the system refuses.
    """
    return _mapped(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def _mapped(fd: int, nbytes: int, flags: int) -> Mapping:
    try:
        memory = mmap.mmap(fd, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise BadMemory(f"{nbytes:,} bytes can't be mapped: {error}") from error
    # A crash must not write gigabytes of other people's KV into a core file.
    memory.madvise(mmap.MADV_DONTDUMP)
    return Mapping(memory)


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Memory of this process as an array. It keeps nothing mapped."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
