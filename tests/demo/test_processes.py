# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpushctl.demo.processes import Child, Processes
from kvpushctl.errors import CommandError

DEADLINE = 20.0

# Starts a grandchild in a session of its own, tells its pid, and waits.
PARENT = (
    "import subprocess, sys, time\n"
    "argv = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "child = subprocess.Popen(argv, start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def told(child: Child) -> int:
    """The number that a child writes first."""

    async def look() -> int | None:
        text = child.tail()
        return int(text) if text else None

    return await child.until("its number", look, DEADLINE)


def test_stopping_ends_grandchildren_in_other_sessions_too(tmp_path: Path) -> None:
    async def body() -> None:
        processes = Processes(tmp_path, os.environ, str(tmp_path))
        child = await processes.start("parent", [sys.executable, "-c", PARENT])
        grandchild = await told(child)
        assert lives(grandchild)
        assert await processes.stop() == []
        assert not lives(child.process.pid)
        assert not lives(grandchild)

    asyncio.run(body())


def test_a_child_that_ignores_sigterm_is_killed_and_named(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"

    async def body() -> None:
        processes = Processes(tmp_path, os.environ, str(tmp_path))
        child = await processes.start("stubborn", [sys.executable, "-c", stubborn])
        await told(child)
        assert await processes.stop(grace=0.2) == ["stubborn"]
        assert not lives(child.process.pid)

    asyncio.run(body())


def test_a_child_that_dies_while_it_is_awaited_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def never() -> None:
        return None

    async def body() -> None:
        processes = Processes(tmp_path, os.environ, str(tmp_path))
        child = await processes.start("engine", [sys.executable, "-c", "import sys; sys.exit('no device')"])
        with pytest.raises(CommandError, match=r"(?s)engine ended with status 1.*no device"):
            await child.until("readiness", never, DEADLINE)
        await processes.stop()

    asyncio.run(body())


def test_a_child_that_takes_too_long_is_an_error_that_says_what_was_awaited(tmp_path: Path) -> None:
    async def never() -> None:
        return None

    async def body() -> None:
        processes = Processes(tmp_path, os.environ, str(tmp_path))
        child = await processes.start("engine", [sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(CommandError, match="engine: readiness did not come within"):
            await child.until("readiness", never, 0.1)
        await processes.stop()

    asyncio.run(body())


def test_a_child_gets_its_stdin_and_ends_by_itself(tmp_path: Path) -> None:
    async def body() -> None:
        processes = Processes(tmp_path, os.environ, str(tmp_path))
        code = "import sys; print(sys.stdin.read())"
        child = await processes.start("reader", [sys.executable, "-c", code], stdin=b"words")
        await child.end(DEADLINE)
        assert child.log.read_text() == "words\n"
        await processes.stop()

    asyncio.run(body())


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, pathlib, sys\n"
        "from kvpushctl.demo.processes import Processes\n"
        "async def body():\n"
        "    processes = Processes(pathlib.Path(sys.argv[1]), os.environ, sys.argv[1])\n"
        "    argv = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    child = await processes.start('sleeper', argv)\n"
        "    print(child.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(body())\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "client")}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
        assert parent.stdout is not None
        sleeper = int(parent.stdout.readline())
        assert lives(sleeper)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE
    while lives(sleeper) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(sleeper)
