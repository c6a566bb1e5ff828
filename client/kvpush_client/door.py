# SPDX-License-Identifier: Apache-2.0
"""A daemon's socket before it is opened: whether this process can come to it."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path


def obstacle(socket: Path, absent: str) -> str | None:
    """What keeps this process from opening a socket, and what to do; None where nothing does.

    `absent` is what to do where it does not exist. Never raises OSError: what can't be seen is an obstacle.
    """
    try:
        return _closed(socket)
    except (FileNotFoundError, NotADirectoryError):
        return f"{socket} does not exist: {absent}"
    except OSError as error:
        return f"{socket}: {error.strerror}"


def _closed(socket: Path) -> str | None:
    """The first folder on the way, or the socket, that this user may not pass. Raises OSError at what is not
    there; nothing else, as all that is asked about lies in folders that can be searched."""
    way = [(folder, os.X_OK, "enter") for folder in reversed(socket.absolute().parents)]
    for place, mode, verb in (*way, (socket, os.R_OK | os.W_OK, "open")):
        found = place.stat()
        if mode == os.X_OK and not stat.S_ISDIR(found.st_mode):
            return f"{place} is no folder: no daemon can be there"
        if not os.access(place, mode):
            owned = f"{stat.filemode(found.st_mode)}, group {_name(found.st_gid)}"
            opens = found.st_mode >> 3 & mode == mode
            remedy = "make it a member of that group" if opens else "be its owner, or open it to a group"
            return f"this user may not {verb} {place} ({owned}): {remedy}"
    return None


def _name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)
