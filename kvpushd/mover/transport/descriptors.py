# SPDX-License-Identifier: Apache-2.0
"""The descriptors of this process, among which are those of NIXL's agents."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterable

from kvpushd.errors import TransportFailed

SPARE = 16
"""With fewer left an agent may not be made: it has 8, and opens others as it begins."""


def names() -> list[str]:
    """All of them. Raises TransportFailed where there is none left to look at them with."""
    try:
        listed = os.listdir("/proc/self/fd")
        # The listing's own is among them, and closed by now: the next file that is opened gets its number.
        return [name for name in listed if _is_open(int(name))]
    except OSError as error:
        raise TransportFailed(f"the mover can't make an agent: {error}") from error


def _is_open(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def shortage() -> str:
    """What NIXL does not say where an agent can't be made: that hardly a file may be opened any more."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(names())
    return f", with {held} of {most} files open" if most - held < SPARE else ""


def epolls(among: Iterable[str]) -> list[int]:
    """Those of some of them that are epoll's."""
    found = []
    for name in among:
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
        except FileNotFoundError:
            continue  # closed meanwhile, by a thread of UCX's
    return found
