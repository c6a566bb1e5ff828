# SPDX-License-Identifier: Apache-2.0
"""What systemd is told: sd_notify(3) over $NOTIFY_SOCKET. Without one, nothing is told to nobody."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping

import structlog


class Notify:
    """The service manager's ear."""

    def __init__(self, env: Mapping[str, str]) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval = _watchdog_interval(env)
        self._log = structlog.get_logger("kvpushd.notify")

    def ready(self, status: str) -> None:
        """Engines can connect."""
        self._tell(f"READY=1\nSTATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        """The service winds down."""
        self._tell(f"STOPPING=1\nSTATUS={_line(status)}")

    def alive(self) -> None:
        """A sign of life."""
        self._tell("WATCHDOG=1")

    async def watch(self, healthy: Callable[[], bool]) -> None:
        """Gives signs of life while `healthy` says so, until cancelled. Returns at once if none is wanted.

        A loop that stands still gives none, and systemd restarts the service.
        """
        if self._interval is None:
            return
        while True:
            if healthy():
                self.alive()
            await asyncio.sleep(self._interval / 3)

    def _tell(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
                told.setblocking(False)
                told.sendto(text.encode(), self._address)
        except OSError as error:
            self._log.warning("systemd can't be told", told=text, error=str(error))


def _watchdog_interval(env: Mapping[str, str]) -> float | None:
    meant = env.get("WATCHDOG_PID", "")
    if meant and meant != str(os.getpid()):
        return None
    microseconds = env.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdigit() and int(microseconds) else None


def _line(text: str) -> str:
    return " ".join(text.split())
