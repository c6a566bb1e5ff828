# SPDX-License-Identifier: Apache-2.0
"""The link between a daemon and its mover: an end whose other one talks nonsense lets go of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpush_client._proto import mover_pb2
from kvpushd.core.layout import Window
from kvpushd.core.words import WriteId
from kvpushd.errors import KvpushError, MoverDied
from kvpushd.mover.handle import MoverHandle
from kvpushd.mover.link import HEADER_BYTES, MAX_MESSAGE_BYTES, Link
from kvpushd.mover.mover import Mover
from kvpushd.mover.transport.fake import FakeFabric, FakeTransport
from kvpushd.mover.transport.local import LocalCarrier
from tests.fuzz.messages import saying

DEADLINE = 20.0
QUICK = settings(derandomize=True, database=None, max_examples=150)


class Liar:
    """A Child whose end of the link the test has. `kill` closes it, as a process's death does."""

    pid = 1

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._dead = asyncio.Event()

    def kill(self) -> None:
        self._end.close()
        self._dead.set()

    async def wait(self) -> str:
        await self._dead.wait()
        return "killed"


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER_BYTES, "big") + message


def reported(data: bytes, *, ends: bool) -> None:
    """What is asked of the handle ends, with the mover's death or an answer; a write exactly once."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        liar = Liar(theirs)
        handle = MoverHandle(Link(ours), liar)
        ended: list[object] = []
        handle.post(
            WriteId(7),
            source_pool=b"s",
            source_blocks=[],
            outlet_id=0,
            target_pool=b"t",
            target_blocks=[],
            window=Window(0, 1, 0, 1),
            ended=ended.append,
        )
        asked = asyncio.ensure_future(handle.unmap_pool(b"p"))
        await asyncio.sleep(0)
        theirs.sendall(data)
        if ends:
            liar.kill()
        else:
            async with asyncio.timeout(DEADLINE):
                await handle.died
        async with asyncio.timeout(DEADLINE):
            await handle.died
            with contextlib.suppress(MoverDied):
                await asked
        assert len(ended) == 1

    asyncio.run(run())


@QUICK
@given(st.lists(saying(mover_pb2.MoverReport), max_size=5))
@example([mover_pb2.MoverReport(write_ended=mover_pb2.WriteEnded(write_id=9)).SerializeToString()])
@example([b"\xff"])
def test_whatever_a_mover_reports_before_its_end_every_call_ends(said: list[bytes]) -> None:
    reported(b"".join(map(framed, said)), ends=True)


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\xff\xff\xff"),
        framed(mover_pb2.MoverReport(write_ended=mover_pb2.WriteEnded(write_id=9)).SerializeToString()),
        (MAX_MESSAGE_BYTES + 1).to_bytes(HEADER_BYTES, "big"),
        b"\xff" * 4096,
    ],
    ids=["no message", "a write that is not under way", "a message that is too large", "bytes"],
)
def test_a_mover_that_talks_nonsense_and_lives_is_killed(data: bytes) -> None:
    reported(data, ends=False)


@QUICK
@given(st.lists(saying(mover_pb2.MoverCommand), max_size=6))
def test_a_mover_answers_any_command_or_refuses_it(said: list[bytes]) -> None:
    with_mover(lambda mover: [_command(mover, data) for data in said])


def with_mover(work: Callable[[Mover], object]) -> None:
    mover = Mover(LocalCarrier(), FakeTransport(FakeFabric()))
    try:
        work(mover)
        mover.step()
    finally:
        mover.close()


def _command(mover: Mover, data: bytes) -> None:
    try:
        command = mover_pb2.MoverCommand.FromString(data)
    except Exception:  # noqa: BLE001, the process ends with it, and the daemon sees that
        return
    with contextlib.suppress(KvpushError, ValueError):  # the process ends with it, and says why
        for report in mover.handle(command):
            assert report.WhichOneof("report")
