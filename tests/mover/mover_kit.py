# SPDX-License-Identifier: Apache-2.0
"""Movers, pools and ways between them, for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvpush_client._proto import types_pb2
from kvpush_client.layout import Group, Layer, Layout, Plane
from kvpush_client.pool import Pool
from kvpushd.core.events import WriteEnded
from kvpushd.core.layout import Blocks, Window
from kvpushd.core.words import WriteId
from kvpushd.mover.attention import Attention
from kvpushd.mover.child import MoverSettings
from kvpushd.mover.handle import MoverHandle, OutletPool
from kvpushd.mover.transport.fake import FakeFabric
from kvpushd.mover.twin import MoverThread

T = TypeVar("T")
R = TypeVar("R")
DEADLINE = 60.0
BLOCK_SIZE = 4


def layout(blocks: int = 64, cell_bytes: int = 256, layers: int = 2) -> Layout:
    """A pool of one head: layers, one after another, of blocks of four tokens."""
    block = BLOCK_SIZE * cell_bytes
    planes = [Plane(i * blocks * block, block, block, cell_bytes, cell_bytes) for i in range(layers)]
    return Layout(
        pool_bytes=layers * blocks * block,
        blocks=blocks,
        groups=(Group(BLOCK_SIZE),),
        layers=tuple(Layer(f"layer{i}", 0, 0, 1, 1, (plane,)) for i, plane in enumerate(planes)),
    )


def pool(cut: Layout, seed: int | None = None) -> Pool:
    """A pool of random bytes, or of zeros."""
    made = Pool.create(cut.pool_bytes, "test")
    if seed is not None:
        made.view[:] = np.random.default_rng(seed).bytes(cut.pool_bytes)
    return made


def cells(made: Pool, cut: Layout) -> np.ndarray:
    """A copy of a pool's bytes as (layer, block, bytes)."""
    return np.frombuffer(bytes(made.view), np.uint8).reshape(len(cut.layers), cut.blocks, -1)


@dataclass
class Way:
    """A mover with a source pool, the pool that its writes land in, and the outlet that leads there."""

    sender: MoverHandle
    receiver: MoverHandle
    source: Pool
    target: Pool
    cut: Layout
    fabric: FakeFabric
    numbers: Iterator[int]
    outlet: int = 0
    source_id: bytes = b"source"
    target_id: bytes = b"target"
    far_id: bytes = b"target-over-there"
    """What the sender calls it."""
    inlets: list[int] = field(default_factory=list)

    async def open_inlet(self) -> tuple[int, types_pb2.Inlet, list[int]]:
        """An inlet over the target pool: its id, and what the receiver says of it."""
        number = next(self.numbers)
        self.inlets.append(number)
        return number, *await soon(
            self.receiver.open_inlet(number, [self.target_id], f"{id(self):x}-{number}")
        )

    async def connect(self, sender: MoverHandle | None = None) -> int:
        """An inlet, and an outlet to it of the same id."""
        number, inlet, bases = await self.open_inlet()
        pools = [OutletPool(self.far_id, bases[0], self.cut)]
        await soon((self.sender if sender is None else sender).open_outlet(number, inlet, pools))
        self.receiver.attend(Attention.FILLING)
        return number

    def post(
        self, source_ids: Sequence[int], target_ids: Sequence[int], **other: object
    ) -> asyncio.Future[WriteEnded]:
        """Writes whole blocks; done with the write's end. A second end would raise InvalidStateError."""
        ended: asyncio.Future[WriteEnded] = asyncio.get_running_loop().create_future()
        arguments: dict[str, object] = {
            "source_pool": self.source_id,
            "source_blocks": (Blocks(0, 0, np.array(source_ids, np.int64)),),
            "outlet_id": self.outlet,
            "target_pool": self.target_id if self.sender is self.receiver else self.far_id,
            "target_blocks": (Blocks(0, 0, np.array(target_ids, np.int64)),),
            "window": Window(0, len(source_ids) * BLOCK_SIZE, 0, len(self.cut.layers)),
            "ended": ended.set_result,
        }
        self.sender.post(WriteId(next(self.numbers)), **(arguments | other))  # type: ignore[arg-type]
        return ended

    async def flood(self, to: Sequence[int]) -> list[asyncio.Future[WriteEnded]]:
        """Sixteen writes of the whole pool, of which the first bytes have come and the last have not."""
        every = list(range(self.cut.blocks))
        # The two have met after the first write, and from then on short runs are packed.
        await soon(self.post(every, to))
        await asyncio.sleep(0.2)
        self.target.view[:] = bytes(self.cut.pool_bytes)
        writes = [self.post(every, to) for _ in range(16)]
        await eventually(lambda: any(self.target.view[:64]))
        return writes

    async def write(
        self, source_ids: Sequence[int], target_ids: Sequence[int], **other: object
    ) -> WriteEnded:
        """The end of a write."""
        return await soon(self.post(source_ids, target_ids, **other))


async def soon(awaitable: Awaitable[T]) -> T:
    """What is awaited, with a deadline."""
    return await asyncio.wait_for(awaitable, DEADLINE)


async def eventually(holds: Callable[[], bool]) -> None:
    """Returns once `holds()`, where nothing can be awaited: another process's memory or beats."""
    async with asyncio.timeout(DEADLINE):
        while not holds():  # noqa: ASYNC110 - no event says what another process does to memory
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def movers(
    kind: str, count: int, fabric: FakeFabric, **settings: object
) -> AsyncIterator[list[MoverHandle]]:
    """Movers of a kind: processes with NIXL, or threads with the fake transport."""
    if kind == "nixl":
        names = [MoverSettings(f"{id(fabric):x}-{i}", **settings) for i in range(count)]  # type: ignore[arg-type]
        made = await asyncio.gather(*(MoverHandle.spawn(each) for each in names))
    else:
        made = [await MoverThread.spawn(fabric) for _ in range(count)]
    try:
        yield made
    finally:
        await asyncio.gather(*(each.kill() for each in made))


@contextlib.asynccontextmanager
async def way_between(
    sender: MoverHandle, receiver: MoverHandle, fabric: FakeFabric, numbers: Iterator[int], cut: Layout
) -> AsyncIterator[Way]:
    """A source and a target pool, connected (by outlet 0 where the movers are one). Undone at the end."""
    source, target = pool(cut, seed=1), pool(cut)
    it = Way(sender, receiver, source, target, cut, fabric, numbers)
    await soon(sender.map_pool(it.source_id, source.fd, cut))
    await soon(receiver.map_pool(it.target_id, target.fd, cut))
    if sender is not receiver:
        it.outlet = await it.connect()
    yield it
    for number in it.inlets:
        if not sender.died.done():
            sender.close_outlet(number)
        if not receiver.died.done():
            await soon(receiver.close_inlet(number))
    for mover, pool_id in ((sender, it.source_id), (receiver, it.target_id)):
        if not mover.died.done():
            await soon(mover.unmap_pool(pool_id))
    source.close()
    target.close()


@contextlib.asynccontextmanager
async def way(kind: str, cut: Layout | None = None, **settings: object) -> AsyncIterator[Way]:
    """A sender and a receiver of their own, connected; for "local", one mover that is both."""
    fabric = FakeFabric()
    async with movers(kind, 1 if kind == "local" else 2, fabric, **settings) as made:
        cut = layout() if cut is None else cut
        async with way_between(made[0], made[-1], fabric, itertools.count(1), cut) as it:
            yield it


class Site:
    """Movers of a kind, for several tests one after another: each makes its own way between them."""

    def __init__(self, kind: str) -> None:
        self._runner = asyncio.Runner()
        self._fabric = FakeFabric()
        self._numbers = itertools.count(1)
        self._stack = contextlib.AsyncExitStack()
        count = 1 if kind == "local" else 2
        self._movers = self.run(self._stack.enter_async_context(movers(kind, count, self._fabric)))

    def run(self, scene: Coroutine[object, object, R]) -> R:
        """Runs a scene on the site's loop."""
        return self._runner.run(scene)

    def way(self, cut: Layout | None = None) -> contextlib.AbstractAsyncContextManager[Way]:
        """A way between the site's movers."""
        cut = layout() if cut is None else cut
        return way_between(self._movers[0], self._movers[-1], self._fabric, self._numbers, cut)

    def close(self) -> None:
        """Ends the movers."""
        self.run(self._stack.aclose())
        self._runner.close()
