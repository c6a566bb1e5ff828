# SPDX-License-Identifier: Apache-2.0
"""Processes as /proc has them, movers and their spares among them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvpushd.mover.process import SPARE


def state(pid: int) -> str:
    """A process's state; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def name(pid: int) -> bytes:
    """What a process is called in ps and top; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return b""


def began(pid: int) -> int:
    """When a process did, in ticks since boot: ids come round. 0 = there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def age(pid: int) -> float:
    """Seconds since a process began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began(pid) / os.sysconf("SC_CLK_TCK")


def movers_of(daemon: int) -> list[int]:
    """Its children that are movers, or may become one."""
    while True:
        threads = list(Path(f"/proc/{daemon}/task").iterdir())
        try:
            # The kernel lists a child under the thread that started it, and once that ended under another.
            children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        return sorted(int(pid) for pid in children if is_mover(int(pid)))


def spares_of(daemon: int) -> list[int]:
    """Those of them that stand by, with all that a mover needs loaded."""
    return [pid for pid in movers_of(daemon) if name(pid) == SPARE]


def is_mover(pid: int) -> bool:
    """Whether a process is a mover, or a spare, and no zombie."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"--agent" in command and b"--parent" in command and state(pid) not in ("", "Z")
