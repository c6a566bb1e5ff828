# SPDX-License-Identifier: Apache-2.0
"""A mover as a process: how it begins and ends, and what its daemon hears of that."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from mover_kit import DEADLINE, Way, cells, eventually, layout, movers, pool, soon, way

from kvpush_client.events import Reason
from kvpushd.errors import MoverDied
from kvpushd.mover.attention import Attention
from kvpushd.mover.child import MoverSettings
from kvpushd.mover.handle import MoverHandle
from kvpushd.mover.process import MOVER, SPARE
from kvpushd.mover.transport.fake import FakeFabric
from testing.processes import name

pytestmark = pytest.mark.nixl


def test_a_killed_mover_ends_each_write_once_fails_each_call_and_is_reported_dead() -> None:
    async def scene() -> None:
        async with way("nixl") as it:
            os.kill(it.sender.pid, signal.SIGSTOP)  # so that none ends well before the kill
            writes = [it.post([block], [block]) for block in range(3)]
            call = asyncio.ensure_future(it.sender.unmap_pool(b"source"))
            await asyncio.sleep(0)
            os.kill(it.sender.pid, signal.SIGKILL)
            fault = await soon(it.sender.died)
            assert fault.reason is Reason.MOVER_DIED
            assert "SIGKILL" in fault.detail
            ends = await soon(asyncio.gather(*writes))
            assert {ended.fault for ended in ends} == {fault}
            with pytest.raises(MoverDied):
                await soon(call)
            with pytest.raises(MoverDied):
                await soon(it.sender.map_pool(b"late", it.source.fd, it.cut))
            assert (await it.write([1], [1])).fault == fault

    asyncio.run(scene())


def test_a_killed_sender_leaves_the_receivers_other_peers_alone() -> None:
    async def scene() -> None:
        cut = layout(blocks=1024, cell_bytes=4096)
        fabric = FakeFabric()
        async with way("nixl", cut) as it, movers("nixl", 1, fabric) as (other,):
            await soon(other.map_pool(b"source", it.source.fd, cut))
            outlet = await it.connect(other)
            every = list(range(cut.blocks))
            writes = await it.flood(every)
            os.kill(it.sender.pid, signal.SIGKILL)
            assert any(ended.fault is not None for ended in await soon(asyncio.gather(*writes)))
            it.sender, it.outlet = other, outlet
            assert (await it.write(every, every)).fault is None
            assert np.array_equal(cells(it.target, cut), cells(it.source, cut))

    asyncio.run(scene())


def test_a_killed_receiver_fails_the_writes_to_it_and_no_others() -> None:
    async def scene() -> None:
        cut = layout(blocks=1024, cell_bytes=4096)
        fabric = FakeFabric()
        async with way("nixl", cut) as it, movers("nixl", 1, fabric) as (other,):
            theirs = pool(cut)
            await soon(other.map_pool(b"theirs", theirs.fd, cut))
            aside = Way(it.sender, other, it.source, theirs, cut, fabric, it.numbers, target_id=b"theirs")
            aside.outlet = await aside.connect()
            every = list(range(cut.blocks))
            doomed = await it.flood(every)
            os.kill(it.receiver.pid, signal.SIGKILL)
            assert (await aside.write(every, every)).fault is None
            assert np.array_equal(cells(theirs, cut), cells(it.source, cut))
            faults = [ended.fault for ended in await soon(asyncio.gather(*doomed)) if ended.fault is not None]
            assert faults
            assert {fault.reason for fault in faults} == {Reason.TRANSPORT_FAILED}

    asyncio.run(scene())


def test_a_write_of_a_hundred_thousand_blocks_passes() -> None:
    async def scene() -> None:
        cut = layout(blocks=100_000, cell_bytes=16, layers=1)
        async with way("nixl", cut) as it:
            order = np.random.default_rng(5).permutation(cut.blocks)
            ended = await it.write(range(cut.blocks), order)
            assert (ended.fault, ended.bytes) == (None, cut.pool_bytes)
            assert np.array_equal(cells(it.target, cut)[:, order], cells(it.source, cut))

    asyncio.run(scene())


def test_bytes_that_come_wake_a_mover_that_expects_none() -> None:
    async def scene() -> None:
        async with way("nixl") as it:
            it.receiver.attend(Attention.IDLE)

            async def one_after_another() -> None:
                # More than an idle mover's own rounds would let in before the deadline.
                for _ in range(400):
                    assert (await it.post([1], [1])).fault is None

            await soon(one_after_another())

    asyncio.run(scene())


def test_a_mover_that_is_flooded_with_small_runs_still_hears_its_commands() -> None:
    async def scene() -> None:
        cut = layout(blocks=8192, cell_bytes=1024, layers=1)
        fabric = FakeFabric()
        async with way("nixl", cut) as it, movers("nixl", 1, fabric) as (other,):
            await soon(other.map_pool(b"source", it.source.fd, cut))
            beside = Way(other, it.receiver, it.source, it.target, cut, fabric, it.numbers)
            beside.outlet = await it.connect(other)
            order = np.random.default_rng(5).permutation(cut.blocks)
            landed, over = 0, False

            async def flood(by: Way, part: np.ndarray) -> None:
                nonlocal landed
                while not over:
                    ended = await by.write(range(len(part)), part)
                    assert ended.fault is None
                    landed += 1

            parts = np.array_split(order, 4)
            floods = [asyncio.ensure_future(flood(by, part)) for by in (it, beside) for part in parts]
            meanwhile = []
            for number in range(20):
                before = landed
                await soon(it.receiver.unmap_pool(b"unknown %d" % number))
                meanwhile.append(landed - before)
            over = True
            await soon(asyncio.gather(*floods))
            assert landed > 0
            # Of eight writes that are in flight at a time: without a pause between them it would be dozens.
            assert np.median(meanwhile) < 8

    asyncio.run(scene())


def test_a_lifeline_held_by_a_mover_ends_with_the_mover() -> None:
    async def scene() -> None:
        read, write = os.pipe()
        mover = await MoverHandle.spawn(MoverSettings("lifeline"), pass_fds=(write,))
        os.close(write)
        assert select.select([read], [], [], 0)[0] == []
        await soon(mover.kill())
        assert os.read(read, 1) == b""
        os.close(read)

    asyncio.run(scene())


def opened(pid: int) -> Counter[str]:
    """What a process has open, by kind: socket, pipe, anon_inode, or a path's first part."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return Counter(link.partition(":")[0] for link in links if not link.startswith("/"))


def test_a_spare_holds_no_agent_and_runs_no_thread_of_its_own_until_it_begins() -> None:
    async def scene() -> None:
        spare = MoverHandle.prepare(MoverSettings(f"spare-{os.getpid()}"))
        await eventually(lambda: name(spare.pid) == SPARE)
        assert opened(spare.pid)["socket"] == 1  # the link
        assert opened(spare.pid)["anon_inode"] == 0
        assert len(os.listdir(f"/proc/{spare.pid}/task")) == 1
        await soon(spare.begin())
        assert name(spare.pid) == MOVER
        assert spare.transports == ("local", "nixl-ucx")
        assert opened(spare.pid)["socket"] > 1
        await soon(spare.stop())
        assert "exit status 0" in spare.died.result().detail

    asyncio.run(scene())


def test_a_spare_that_died_does_not_begin() -> None:
    async def scene() -> None:
        spare = MoverHandle.prepare(MoverSettings(f"spare-{os.getpid()}"))
        await soon(spare.kill())
        with pytest.raises(MoverDied, match="SIGKILL"):
            await soon(spare.begin())

    asyncio.run(scene())


def test_a_spare_that_dies_as_it_begins_is_reported() -> None:
    async def scene() -> None:
        spare = MoverHandle.prepare(MoverSettings(f"spare-{os.getpid()}"))
        os.kill(spare.pid, signal.SIGSTOP)
        begun = asyncio.ensure_future(spare.begin())
        await asyncio.sleep(0)
        os.kill(spare.pid, signal.SIGKILL)
        with pytest.raises(MoverDied, match="SIGKILL"):
            await soon(begun)

    asyncio.run(scene())


def test_a_stopped_mover_ends_in_order() -> None:
    async def scene() -> None:
        async with way("nixl") as it:
            await soon(it.sender.stop())
            assert "exit status 0" in it.sender.died.result().detail

    asyncio.run(scene())


def test_a_mover_that_can_not_begin_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def scene() -> None:
        said = r"ucx\.tls = 'no-such-transport', ucx\.net_devices = 'all', ucx\.env = {'UCX_A': '1'}"
        wrong = MoverSettings("none", ucx_tls="no-such-transport", environment={"UCX_A": "1"})
        with pytest.raises(MoverDied, match=said):
            await soon(MoverHandle.spawn(wrong))
        assert "Traceback" not in capfd.readouterr().err

    asyncio.run(scene())


def test_a_mover_beats_by_itself() -> None:
    async def scene() -> None:
        async with movers("nixl", 1, FakeFabric()) as (mover,):
            for _ in range(2):
                rounds = mover.beat.rounds
                await eventually(lambda rounds=rounds: mover.beat.rounds > rounds)

    asyncio.run(scene())


DAEMON = """
import asyncio, sys
from kvpushd.mover.child import MoverSettings
from kvpushd.mover.handle import MoverHandle

async def live():
    child = MoverHandle.prepare(MoverSettings("orphan"), pass_fds=(1,))
    if sys.argv[1] == "mover":
        await child.begin()
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""


@pytest.mark.parametrize("what", ["spare", "mover"])
def test_a_mover_dies_with_its_daemon_and_so_does_a_spare_however_far_it_is(what: str) -> None:
    command = [sys.executable, "-c", DAEMON, what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        child = os.pidfd_open(int(daemon.stdout.readline()))
        daemon.kill()
    assert select.select([child], [], [], DEADLINE)[0] == [child]
    os.close(child)


def test_a_spare_that_stands_by_dies_with_its_daemon() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, "spare"], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        asyncio.run(eventually(lambda: name(pid) == SPARE))
        spare = os.pidfd_open(pid)
        daemon.kill()
    assert select.select([spare], [], [], DEADLINE)[0] == [spare]
    os.close(spare)
