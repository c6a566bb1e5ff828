# SPDX-License-Identifier: Apache-2.0
"""Ports for what is about to be started."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_TRIES = 64


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody uses now.

    Not one of those that the system gives to connections, if there are others: another process's connection
    would get it before it is listened on, now and then. Raises OSError where the host has no port left.
    """
    first, last = (int(port) for port in _EPHEMERAL.read_text().split())
    others = [*range(_LOWEST, first), *range(last + 1, 1 << 16)]
    for port in secrets.SystemRandom().sample(others, min(_TRIES, len(others))):
        with contextlib.suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
        return found
