# SPDX-License-Identifier: Apache-2.0
"""Network namespaces of `ip netns`: a process enters one, a pair of them is joined by a link. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_REC_SLAVE = 0x4000 | 0x80000
_MNT_DETACH = 2

_FAST = 5_000_000_000
"""Bytes a second: more than a virtual cable carries."""
_DRAINED = 5.0
"""Seconds within which such a cable has carried whatever was queued."""


def enter(name: str) -> None:
    """Moves this process into a namespace, with its own /sys, as `ip netns exec` does.

    For a process with one thread that has opened no socket yet. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(libc.setns(namespace, _CLONE_NEWNET), f"enter {name}")
    finally:
        os.close(namespace)
    # UCX reads /sys/class/net, which shows the namespace that mounted it.
    _check(libc.unshare(_CLONE_NEWNS), "unshare mounts")
    _check(libc.mount(b"", b"/", b"none", ctypes.c_ulong(_MS_REC_SLAVE), None), "make / a slave")
    libc.umount2(b"/sys", _MNT_DETACH)  # it may not be mounted here, and then there is nothing to hide
    _check(libc.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount /sys")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prefix(name: str | None) -> list[str]:
    """What comes before a command that is to run in a namespace; nothing for None."""
    return [] if name is None else ["ip", "netns", "exec", name]


class Link:
    """Two namespaces joined by a virtual cable. `shape` sets its rate; both ends go away at `close`.

    hosts    the address of each end, for the other
    names    the namespaces
    """

    def __init__(self, name: str, subnet: str = "10.231.77") -> None:
        self.names = (f"{name}-p", f"{name}-d")
        self.hosts = (f"{subnet}.1", f"{subnet}.2")
        self.devices = ("kvp0", "kvd0")
        self.rate: int | None = None
        try:
            for namespace in self.names:
                _run("ip", "netns", "add", namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            ends = [
                ["name", device, "netns", namespace]
                for device, namespace in zip(self.devices, self.names, strict=True)
            ]
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for namespace, device, host in zip(self.names, self.devices, self.hosts, strict=True):
                _run("ip", "-n", namespace, "addr", "add", f"{host}/24", "dev", device)
                _run("ip", "-n", namespace, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def shape(self, bytes_per_second: int | None) -> None:
        """Limits both directions to a rate; None = as fast as the machine goes. Drops nothing that is queued.

        Raises TimeoutError where what is queued does not leave.
        """
        for namespace, device in zip(self.names, self.devices, strict=True):
            if bytes_per_second is not None:
                self._limit(namespace, device, bytes_per_second)
            elif self.rate is not None:
                self._limit(namespace, device, _FAST)
                # Else TCP would wait for its timer to send all of it again: after a slow link, for seconds.
                deadline = time.monotonic() + _DRAINED
                while "backlog 0b" not in _run("tc", "-s", "-n", namespace, "qdisc", "show", "dev", device):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{device} still has packets after {_DRAINED:g} s")
                    time.sleep(0.001)
                _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        self.rate = bytes_per_second

    def _limit(self, namespace: str, device: str, rate: int) -> None:
        # A burst of two milliseconds (a timer's grain, and one segmented packet at the least), and a queue of
        # twenty: a switch's.
        burst = max(128 << 10, rate // 500)
        limit = burst + rate // 50
        shape = ["tbf", "rate", f"{rate * 8}bit", "burst", str(burst), "limit", str(limit)]
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def up(self, yes: bool) -> None:
        """Plugs the cable in, or pulls it."""
        _run("ip", "-n", self.names[0], "link", "set", self.devices[0], "up" if yes else "down")

    def close(self) -> None:
        """Removes both namespaces. Processes in them keep running without a link."""
        for namespace in self.names:
            if Path(f"/run/netns/{namespace}").exists():
                _run("ip", "netns", "delete", namespace)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
