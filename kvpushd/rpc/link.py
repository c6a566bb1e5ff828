# SPDX-License-Identifier: Apache-2.0
"""One end of a link, the same on both sides.

A link is one bidirectional stream: a bounded queue out, items in, beats, and the silence after which the
other side counts as gone. `links.py` dials, `peer.py` takes links.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import grpc.aio

from kvpush_client._proto import peer_pb2
from kvpush_client.count import Count, Lost
from kvpushd.errors import Invalid, KvpushError, OverLimit, Unreachable
from kvpushd.rpc.nudge import Nudge
from kvpushd.rpc.terms import Terms

# What gRPC reads at the end of a stream.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs

MOST_ITEMS = 512
"""In a message: `items_per_message` is this at least, on any node."""

Said = TypeVar("Said", peer_pb2.ReceiverItem, peer_pb2.SenderItem)
Result = TypeVar("Result")
Heard = TypeVar("Heard", peer_pb2.ReceiverItem, peer_pb2.SenderItem)


class Wire(Generic[Said, Heard]):
    """One end of a link that is past its hellos, or waits for them: what is sent by then is queued."""

    def __init__(
        self,
        terms: Terms,
        beat: Callable[[], Said],
        pack: Callable[[Sequence[Said], int], Any],
    ) -> None:
        """`pack` makes a message of items and of how many were said before them."""
        self._terms = terms
        self._beat: Callable[[], Said] = beat
        self._pack: Callable[[Sequence[Said], int], Any] = pack
        self._queue: deque[tuple[Said, int]] = deque()
        self._queued_bytes = 0
        self._nudge = Nudge()
        self._over: asyncio.Future[KvpushError] = asyncio.get_running_loop().create_future()
        self._heard_at = 0.0
        self._said = 0
        self._count = Count()

    @property
    def ended(self) -> bool:
        """Whether nothing will be carried any more."""
        return self._over.done()

    def send(self, item: Said, *, hurry: bool = True) -> None:
        """Queues an item; never blocks. After the end nothing happens. One in no `hurry` waits a moment for
        others to go with.

        Ends the wire if the peer does not take what is queued. Raises OverLimit if the item alone is
        larger than a message may be.
        """
        if self.ended:
            return
        size = item.ByteSize() + 8
        if size > self._terms.message_bytes:
            raise OverLimit(f"an item of {size} bytes; a message may have {self._terms.message_bytes}")
        if (
            len(self._queue) >= self._terms.queued_items
            or self._queued_bytes + size > 4 * self._terms.message_bytes
        ):
            self.end(
                OverLimit(
                    f"{len(self._queue)} items ({self._queued_bytes} bytes) wait: the peer takes nothing"
                )
            )
            return
        self._queue.append((item, size))
        self._queued_bytes += size
        self._nudge.now() if hurry else self._nudge.soon()

    def end(self, error: KvpushError) -> None:
        """Makes `run` raise; the first error counts."""
        if not self._over.done():
            self._over.set_result(error)

    async def unless_ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is cancelled if the wire ends first: then raises why."""
        task = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._over}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                raise self._over.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def run(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        peer_silence: float,
        heard: Callable[[Heard], None],
    ) -> None:
        """Carries items until the link ends; always raises, a KvpushError or what gRPC raised.

        `heard` is called on the loop, in order; a KvpushError that it raises ends the link.
        """
        self._heard_at = asyncio.get_running_loop().time()
        tasks = [
            asyncio.ensure_future(part)
            for part in (
                self._read(read, heard),
                self._write(write, min(peer_silence, self._terms.silence) / 3),
                self._watch(),
                self._ended(),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Several can end in one turn. Reading knows best why.
            for task in tasks:
                if task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.end(Unreachable("the link is over"))

    async def _read(self, read: Callable[[], Awaitable[Any]], heard: Callable[[Heard], None]) -> None:
        loop = asyncio.get_running_loop()
        while (message := await read()) is not EOF:
            self._heard_at = loop.time()
            if message.HasField("hello"):
                raise Invalid("a second hello")
            if len(message.items) > self._terms.items_per_message:
                raise Invalid(
                    f"{len(message.items)} items in a message; allowed: {self._terms.items_per_message}"
                )
            for item in self._unheard(message):
                kind = item.WhichOneof("item")
                if kind is None:
                    raise Invalid("an item that says nothing, or what this version does not know")
                if kind != "beat":
                    heard(item)
        raise Unreachable("the peer closed the link")

    def _unheard(self, message: Any) -> Sequence[Heard]:
        try:
            return self._count.new(message.items, message.first if message.HasField("first") else None)
        except Lost as error:
            raise Unreachable(f"the peer's link: {error}") from error

    async def _write(self, write: Callable[[Any], Awaitable[None]], every: float) -> None:
        while True:
            try:
                async with asyncio.timeout(every):
                    await self._nudge.wait()
            except TimeoutError:
                batch = [self._beat()]
            else:
                batch = self._take()
            first, self._said = self._said, self._said + len(batch)
            await write(self._pack(batch, first))

    def _take(self) -> list[Said]:
        batch: list[Said] = []
        room = self._terms.message_bytes
        while self._queue and len(batch) < MOST_ITEMS:
            item, size = self._queue[0]
            if batch and size > room:
                break
            self._queue.popleft()
            self._queued_bytes -= size
            room -= size
            batch.append(item)
        if not self._queue:
            self._nudge.done()
        return batch

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        silence = self._terms.silence
        while True:
            # At moments that all links share: to wake once for all of them costs less.
            expected = (loop.time() // (silence / 8) + 1) * (silence / 8)
            await asyncio.sleep(expected - loop.time())
            late = loop.time() - expected
            if late > silence / 8:
                # This process stood still (a stopped VM, a debugger): that is no silence of the peer's,
                # whose beats wait in the socket.
                self._heard_at += late
            if loop.time() - self._heard_at > silence:
                raise Unreachable(f"the peer was silent for {silence:g} s")

    async def _ended(self) -> None:
        raise await self._over
