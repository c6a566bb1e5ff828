# SPDX-License-Identifier: Apache-2.0
"""A mover's rules, without a process: what it does with commands that come twice, late or wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mover_kit import BLOCK_SIZE, cells, layout, pool

from kvpush_client._proto import mover_pb2, types_pb2
from kvpush_client.events import Reason
from kvpushd.core.layout import Blocks
from kvpushd.errors import Invalid, TransportFailed
from kvpushd.mover import blocks
from kvpushd.mover.mover import Mover
from kvpushd.mover.transport.base import Region
from kvpushd.mover.transport.fake import FakeFabric, FakeTransport
from kvpushd.mover.transport.local import LocalCarrier
from kvpushd.rpc import wire

CUT = layout(blocks=8)


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = Mover(LocalCarrier(), FakeTransport(FakeFabric()))
    yield made
    made.close()


def do(mover: Mover, descriptor: int | None = None, **command: object) -> list[mover_pb2.MoverReport]:
    return mover.handle(mover_pb2.MoverCommand(**command), descriptor)  # type: ignore[arg-type]


def map_pool(mover: Mover, pool_id: bytes, seed: int | None = None) -> object:
    made = pool(CUT, seed)
    command = mover_pb2.MapPool(pool_id=pool_id, layout=wire.layout_to_wire(CUT))
    (report,) = do(mover, os.dup(made.fd), map_pool=command)
    assert not report.pool_mapped.HasField("fault")
    return made


def local_write(write_id: int) -> mover_pb2.PostWrite:
    every = blocks.to_wire([Blocks(0, 0, np.arange(CUT.blocks))])
    return mover_pb2.PostWrite(
        write_id=write_id,
        source_pool=b"a",
        target_pool=b"b",
        source_blocks=every,
        target_blocks=every,
        end=CUT.blocks * BLOCK_SIZE,
        end_layer=2,
    )


def ends(reports: list[mover_pb2.MoverReport]) -> list[int]:
    return [report.write_ended.write_id for report in reports if report.HasField("write_ended")]


def test_a_write_that_is_said_twice_ends_once(mover: Mover) -> None:
    source, target = map_pool(mover, b"a", seed=1), map_pool(mover, b"b")
    assert do(mover, post_write=local_write(5)) == []
    assert do(mover, post_write=local_write(5)) == []
    assert ends(mover.step() + mover.step()) == [5]
    assert np.array_equal(cells(target, CUT), cells(source, CUT))
    # Nothing of the second is left to hold a pool.
    for pool_id in (b"a", b"b"):
        (left,) = do(mover, unmap_pool=mover_pb2.UnmapPool(pool_id=pool_id))
        assert left.pool_unmapped.pool_id == pool_id


def test_both_pools_of_a_local_write_stay_mapped_until_it_ends(mover: Mover) -> None:
    source, target = map_pool(mover, b"a", seed=1), map_pool(mover, b"b")
    do(mover, post_write=local_write(1))
    assert do(mover, unmap_pool=mover_pb2.UnmapPool(pool_id=b"a")) == []
    assert do(mover, unmap_pool=mover_pb2.UnmapPool(pool_id=b"b")) == []
    reports = [report.WhichOneof("report") for report in mover.step()]
    assert reports[:3] == ["write_ended", "pool_unmapped", "pool_unmapped"]
    assert np.array_equal(cells(target, CUT), cells(source, CUT))


def test_a_pool_that_waits_for_its_last_write_to_leave_takes_no_new_one(mover: Mover) -> None:
    map_pool(mover, b"a", seed=1)
    map_pool(mover, b"b")
    do(mover, post_write=local_write(1))
    assert do(mover, unmap_pool=mover_pb2.UnmapPool(pool_id=b"a")) == []
    (ended,) = do(mover, post_write=local_write(2))
    assert ended.write_ended.fault.reason == Reason.INVALID
    assert ends(mover.step()) == [1]


def test_a_write_whose_block_ids_were_cut_off_is_refused(mover: Mover) -> None:
    map_pool(mover, b"a", seed=1)
    map_pool(mover, b"b")
    write = local_write(1)
    write.source_blocks[0].ids = write.source_blocks[0].ids[:-1]
    (ended,) = do(mover, post_write=write)
    assert ended.write_ended.fault.reason == Reason.INVALID
    assert "8 bytes each" in ended.write_ended.fault.detail


def test_a_layout_that_lies_about_its_pool_writes_nothing_outside_of_it(mover: Mover) -> None:
    map_pool(mover, b"a", seed=1)
    smaller = replace(CUT, pool_bytes=CUT.pool_bytes // 2)
    pools = [mover_pb2.OutletPool(pool_id=b"b", base=1 << 20, layout=wire.layout_to_wire(smaller))]
    inlet = types_pb2.Inlet(transport="fake", agent="other", metadata=b"other")
    (opened,) = do(mover, open_outlet=mover_pb2.OpenOutlet(outlet_id=1, inlet=inlet, pools=pools))
    assert not opened.outlet_opened.HasField("fault")
    write = local_write(1)
    write.outlet_id = 1
    (ended,) = do(mover, post_write=write)
    assert ended.write_ended.fault.reason == Reason.INVALID
    assert "target runs" in ended.write_ended.fault.detail


def test_unmapping_what_is_not_mapped_and_closing_what_is_not_open_is_answered(mover: Mover) -> None:
    (unmapped,) = do(mover, unmap_pool=mover_pb2.UnmapPool(pool_id=b"none"))
    assert unmapped.pool_unmapped.pool_id == b"none"
    (closed,) = do(mover, close_inlet=mover_pb2.CloseInlet(inlet_id=3))
    assert closed.inlet_closed.inlet_id == 3


def test_a_pool_whose_descriptor_did_not_come_or_is_too_short_is_refused(mover: Mover) -> None:
    for descriptor in (None, os.memfd_create("empty")):
        command = mover_pb2.MapPool(pool_id=b"a", layout=wire.layout_to_wire(CUT))
        (report,) = do(mover, descriptor, map_pool=command)
        assert report.pool_mapped.fault.reason == Reason.BAD_MEMORY


class Unwilling(LocalCarrier):
    """Takes no pool."""

    def register(self, region: Region) -> None:
        raise TransportFailed("no")


def test_a_pool_that_one_of_two_carriers_refuses_is_held_by_neither_and_can_be_offered_again() -> None:
    fabric = FakeTransport(FakeFabric())
    mover, made = Mover(Unwilling(), fabric), pool(CUT)
    command = mover_pb2.MapPool(pool_id=b"a", layout=wire.layout_to_wire(CUT))
    for _ in range(2):
        (report,) = do(mover, os.dup(made.fd), map_pool=command)
        assert report.pool_mapped.fault.reason == Reason.TRANSPORT_FAILED
    assert "memfd:test" in Path("/proc/self/maps").read_text()
    made.close()
    assert "memfd:test" not in Path("/proc/self/maps").read_text()


def test_a_command_of_another_version_is_an_error(mover: Mover) -> None:
    with pytest.raises(Invalid, match="another version"):
        do(mover)


def test_an_idle_mover_waits_long_and_one_with_a_write_does_not(mover: Mover) -> None:
    map_pool(mover, b"a", seed=1)
    map_pool(mover, b"b")
    for _ in range(2):
        mover.step()  # fills in page tables, a pool each
    assert mover.wait > 0.1
    do(mover, attend=mover_pb2.Attend(attention=mover_pb2.ATTENTION_FILLING))
    assert 0 < mover.wait < 0.001
    do(mover, attend=mover_pb2.Attend(attention=mover_pb2.ATTENTION_IDLE))
    do(mover, post_write=local_write(1))
    assert mover.wait == 0
