# SPDX-License-Identifier: Apache-2.0
"""What transport/base.py promises, for each way that bytes can go, through the handle that daemons use."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from mover_kit import Site, cells, eventually, layout, pool, soon, way

from kvpush_client.events import Reason
from kvpushd.core.layout import Window
from kvpushd.errors import Invalid, KvpushError
from kvpushd.mover.handle import OutletPool

nixl = pytest.param("nixl", marks=pytest.mark.nixl)
every_way = pytest.mark.parametrize("site", ["local", "fake", nixl], indirect=True)
between_movers = pytest.mark.parametrize("site", ["fake", nixl], indirect=True)


@every_way
def test_a_write_lands_its_blocks_and_touches_no_other(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            ended = await it.write([5, 6, 1, 9], [40, 2, 3, 11])
            assert (ended.fault, ended.bytes) == (None, 4 * 2 * 1024)
            assert 0 < ended.posted <= ended.ended
            expected = np.zeros_like(cells(it.target, it.cut))
            expected[:, [40, 2, 3, 11]] = cells(it.source, it.cut)[:, [5, 6, 1, 9]]
            assert np.array_equal(cells(it.target, it.cut), expected)

    site.run(scene())


@every_way
def test_blocks_that_lie_side_by_side_on_both_sides_are_one_run(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            ended = await it.write([5, 6, 7, 8], [20, 21, 22, 23], window=Window(0, 16, 0, 1))
            assert (ended.fault, ended.bytes, ended.runs) == (None, 4 * 1024, 1)

    site.run(scene())


@every_way
def test_one_long_run_lands_whole_and_touches_nothing_beside_it(site: Site) -> None:
    async def scene() -> None:
        cut = layout(blocks=1024, cell_bytes=1000)
        async with site.way(cut) as it:
            blocks = list(range(3, 1000))
            ended = await it.write(blocks, blocks)
            assert (ended.fault, ended.runs) == (None, 2)
            expected = np.zeros_like(cells(it.target, cut))
            expected[:, blocks] = cells(it.source, cut)[:, blocks]
            assert np.array_equal(cells(it.target, cut), expected)

    site.run(scene())


@every_way
def test_each_of_many_writes_ends_once_and_all_land(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            order = np.random.default_rng(3).permutation(it.cut.blocks).tolist()
            ends = await soon(asyncio.gather(*(it.post([block], [to]) for block, to in enumerate(order))))
            assert [ended.fault for ended in ends] == [None] * it.cut.blocks
            assert np.array_equal(cells(it.target, it.cut)[:, order], cells(it.source, it.cut))

    site.run(scene())


@every_way
def test_a_write_of_nothing_ends_at_once(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            ended = await it.write([1], [2], window=Window(0, 0, 0, 2))
            assert (ended.fault, ended.bytes, ended.runs) == (None, 0, 0)

    site.run(scene())


@every_way
@pytest.mark.parametrize(
    "wrong",
    [{"outlet_id": 1 << 40}, {"source_pool": b"no such"}, {"target_pool": b"no such"}],
    ids=["outlet", "source", "target"],
)
def test_a_write_that_names_what_is_not_there_ends_with_invalid_and_the_next_one_lands(
    site: Site, wrong: dict[str, object]
) -> None:
    async def scene() -> None:
        async with site.way() as it:
            refused = await it.write([1], [1], **wrong)
            assert refused.fault is not None
            assert refused.fault.reason is Reason.INVALID
            assert (await it.write([1], [1])).fault is None

    site.run(scene())


@every_way
def test_a_write_to_a_block_beyond_the_pool_touches_nothing(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            refused = await it.write([1, 2], [1, it.cut.blocks])
            assert refused.fault is not None
            assert refused.fault.reason in (Reason.INVALID, Reason.LAYOUT_MISMATCH)
            assert not cells(it.target, it.cut).any()

    site.run(scene())


@every_way
def test_a_source_pool_is_unmapped_only_after_the_write_that_reads_it(site: Site) -> None:
    async def scene() -> None:
        cut = layout(blocks=1024, cell_bytes=8192)
        async with site.way(cut) as it:
            every = list(range(cut.blocks))
            write = it.post(every, every)
            await soon(it.sender.unmap_pool(b"source"))
            assert write.done()
            assert write.result().fault is None
            assert np.array_equal(cells(it.target, cut), cells(it.source, cut))

    site.run(scene())


@every_way
def test_a_pool_that_is_to_leave_takes_no_new_writes(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            leaving = asyncio.ensure_future(it.sender.unmap_pool(b"source"))
            await asyncio.sleep(0)  # the command is sent before the write's
            ended = await it.write([1], [1])
            await soon(leaving)
            assert ended.fault is not None
            assert ended.fault.reason is Reason.INVALID

    site.run(scene())


@every_way
def test_a_pool_can_be_mapped_again_after_it_was_unmapped(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            with pytest.raises(Invalid, match="mapped already"):
                await soon(it.sender.map_pool(b"source", it.source.fd, it.cut))
            await soon(it.sender.unmap_pool(b"source"))
            await soon(it.sender.map_pool(b"source", it.source.fd, it.cut))
            assert (await it.write([1], [1])).fault is None

    site.run(scene())


@between_movers
def test_after_an_inlet_is_closed_nothing_lands_and_the_writes_end_with_a_fault(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            assert (await it.write([1], [1])).fault is None
            await soon(it.receiver.close_inlet(it.outlet))
            before = cells(it.target, it.cut)
            ended = await it.write([2, 3], [2, 3])
            assert ended.fault is not None
            assert ended.fault.reason is Reason.TRANSPORT_FAILED
            assert np.array_equal(cells(it.target, it.cut), before)

    site.run(scene())


@between_movers
def test_closing_one_inlet_leaves_the_others_open(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            second = await it.connect()
            assert (await it.write([1], [1])).fault is None
            await soon(it.receiver.close_inlet(it.outlet))
            assert (await it.write([2], [2], outlet_id=second)).fault is None
            assert np.array_equal(cells(it.target, it.cut)[:, 2], cells(it.source, it.cut)[:, 2])

    site.run(scene())


@between_movers
def test_a_target_pool_is_unmapped_only_after_its_last_inlet_is_closed(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            leaving = asyncio.ensure_future(it.receiver.unmap_pool(b"target"))
            assert (await it.write([1], [1])).fault is None
            assert not leaving.done()
            await soon(it.receiver.close_inlet(it.outlet))
            await soon(leaving)

    site.run(scene())


@between_movers
def test_an_outlet_closed_with_a_write_in_flight_lets_it_end_and_takes_no_more(site: Site) -> None:
    async def scene() -> None:
        cut = layout(blocks=1024, cell_bytes=8192)
        async with site.way(cut) as it:
            every = list(range(cut.blocks))
            write = it.post(every, every)
            it.sender.close_outlet(it.outlet)
            refused = await it.write([1], [1])
            assert refused.fault is not None
            assert refused.fault.reason is Reason.INVALID
            assert (await soon(write)).fault is None
            assert np.array_equal(cells(it.target, cut), cells(it.source, cut))

    site.run(scene())


@between_movers
def test_an_inlet_over_an_unknown_pool_is_refused(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            with pytest.raises(Invalid, match="not mapped"):
                await soon(it.receiver.open_inlet(next(it.numbers), [b"no such"], "of nothing"))

    site.run(scene())


@between_movers
def test_an_outlet_with_metadata_of_another_agent_or_of_none_is_refused(site: Site) -> None:
    async def scene() -> None:
        async with site.way() as it:
            number, inlet, bases = await it.open_inlet()
            pools = [OutletPool(b"target", bases[0], it.cut)]
            inlet.agent += "-other"
            with pytest.raises(Invalid):
                await soon(it.sender.open_outlet(number, inlet, pools))
            inlet.metadata = b"nothing that a transport wrote"
            with pytest.raises(KvpushError):
                await soon(it.sender.open_outlet(number, inlet, pools))
            assert (await it.write([1], [1])).fault is None

    site.run(scene())


def test_writes_that_hang_end_when_the_link_is_back() -> None:
    async def scene() -> None:
        async with way("fake") as it:
            it.fabric.hang()
            write = it.post([1], [1])
            rounds = it.sender.beat.rounds
            await eventually(lambda: it.sender.beat.rounds > rounds)
            assert not write.done()
            it.fabric.go_on()
            assert (await soon(write)).fault is None

    asyncio.run(scene())


def test_a_way_that_is_cut_ends_its_writes_and_another_to_the_same_pool_takes_the_next() -> None:
    async def scene() -> None:
        async with way("fake") as it:
            it.fabric.hang()
            write = it.post([1], [1])
            it.sender.close_outlet(it.outlet, now=True)
            ended = await soon(write)
            assert ended.fault is not None
            assert ended.fault.reason is Reason.TRANSPORT_FAILED
            it.fabric.go_on()
            assert (await it.write([2], [2], outlet_id=await it.connect())).fault is None
            assert not cells(it.target, it.cut)[:, 1].any()

    asyncio.run(scene())


def test_a_failed_write_and_a_cut_agent_end_with_a_fault_each() -> None:
    async def scene() -> None:
        async with way("fake") as it:
            it.fabric.fail(1)
            it.fabric.delay(3)
            assert (await it.write([1], [1])).fault is not None
            assert (await it.write([1], [1])).fault is None
            it.fabric.disconnect(f"{id(it):x}-{it.outlet}")
            assert (await it.write([1], [1])).fault is not None

    asyncio.run(scene())


def test_a_small_write_between_local_pools_does_not_wait_for_a_large_one() -> None:
    async def scene() -> None:
        cut = layout(blocks=1024, cell_bytes=8192)
        async with way("local", cut) as it:
            every = list(range(cut.blocks))
            large, small = it.post(every, every), it.post([1], [1])
            assert (await soon(small)).fault is None
            assert (await soon(large)).ended > small.result().ended

    asyncio.run(scene())


@pytest.mark.nixl
def test_a_mover_told_to_corrupt_its_writes_damages_each_one() -> None:
    async def scene() -> None:
        async with way("nixl", fault="corrupt-writes") as it:
            await soon(it.sender.map_pool(b"local", (near := pool(it.cut)).fd, it.cut))
            for target, other in ((it.target, {}), (near, {"outlet_id": 0, "target_pool": b"local"})):
                assert (await it.write([1, 2], [1, 2], **other)).fault is None
                landed, sent = cells(target, it.cut), cells(it.source, it.cut)
                assert (landed[:, 1:3] != sent[:, 1:3]).sum() > 32
                assert np.array_equal(landed[1, 2], sent[1, 2])

    asyncio.run(scene())


@pytest.mark.nixl
@pytest.mark.parametrize("verify", ["all", "off"])
def test_a_damaged_write_fails_where_all_are_verified_and_lands_wrong_where_none_is(verify: str) -> None:
    async def scene() -> None:
        cut = layout(cell_bytes=65536)  # several pieces to inspect
        async with way("nixl", cut, fault="corrupt-writes", verify=verify) as it:
            await soon(it.sender.map_pool(b"local", (near := pool(it.cut)).fd, it.cut))
            for target, other in ((it.target, {}), (near, {"outlet_id": 0, "target_pool": b"local"})):
                ended = await it.write(range(1, 60, 2), range(1, 60, 2), **other)
                assert not np.array_equal(cells(target, it.cut)[0, 1], cells(it.source, it.cut)[0, 1])
                assert (ended.fault is None) is (verify == "off")
                assert ended.fault is None or ended.fault.reason is Reason.CORRUPTED

    asyncio.run(scene())


@pytest.mark.nixl
def test_a_write_that_is_verified_lands_and_ends_once_however_many_are_under_way() -> None:
    async def scene() -> None:
        cut = layout(cell_bytes=65536)
        async with way("nixl", cut, verify="all") as it:
            writes = [it.post([at, at + 20], [at, at + 20]) for at in range(1, 11)]
            for write in writes:
                assert (await soon(write)).fault is None
            landed, sent = cells(it.target, cut), cells(it.source, cut)
            assert np.array_equal(landed[:, 1:11], sent[:, 1:11])

    asyncio.run(scene())
