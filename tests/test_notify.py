# SPDX-License-Identifier: Apache-2.0
"""What systemd is told, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpushd.notify import Notify


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(20)
        yield heard


def test_each_word_is_one_datagram(manager: socket.socket) -> None:
    notify = Notify({"NOTIFY_SOCKET": manager.getsockname()})
    notify.ready("2 engines,\nREADY=0")
    notify.alive()
    notify.stopping("draining")
    assert [manager.recv(4096).decode() for _ in range(3)] == [
        "READY=1\nSTATUS=2 engines, READY=0",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=draining",
    ]


def test_an_abstract_socket_is_found_by_its_at_sign() -> None:
    name = f"kvpushd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0{name}")
        heard.settimeout(20)
        Notify({"NOTIFY_SOCKET": f"@{name}"}).alive()
        assert heard.recv(64) == b"WATCHDOG=1"


@pytest.mark.parametrize("env", [{}, {"NOTIFY_SOCKET": "/nowhere/notify"}])
def test_without_a_manager_nothing_happens(env: dict[str, str]) -> None:
    Notify(env).ready("x")


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        ({"WATCHDOG_USEC": "30000000"}, True),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
    ],
)
def test_signs_of_life_are_given_only_to_a_watchdog_of_this_process(
    env: dict[str, str], wanted: bool
) -> None:
    async def run() -> None:
        asked = asyncio.Event()
        watching = asyncio.ensure_future(Notify(env).watch(lambda: asked.set() is None))
        await asyncio.sleep(0)
        assert (asked.is_set(), watching.done()) == (wanted, not wanted)
        watching.cancel()

    asyncio.run(run())


def test_signs_of_life_stop_when_the_daemon_is_not_healthy(manager: socket.socket) -> None:
    async def run() -> None:
        notify = Notify({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "3000"})
        asked = asyncio.Semaphore(0)
        answers = iter([True, False, True])

        def healthy() -> bool:
            asked.release()
            return next(answers, False)

        watching = asyncio.ensure_future(notify.watch(healthy))
        async with asyncio.timeout(20):
            for _ in range(5):
                await asked.acquire()
        watching.cancel()
        notify.ready("end")
        said = [b"WATCHDOG=1", b"WATCHDOG=1", b"READY=1\nSTATUS=end"]
        assert [manager.recv(64) for _ in range(3)] == said

    asyncio.run(run())
