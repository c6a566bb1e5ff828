# SPDX-License-Identifier: Apache-2.0
"""Links to peers, as the receiving side makes them.

A link is one bidirectional stream. Both ends share `Wire`: a bounded queue out, items in, beats, and the
silence after which the other side counts as gone. `Links` dials; the servicer's side is in `peer.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
import structlog

from kvpush_client._proto import peer_pb2
from kvpush_client._proto.peer_pb2_grpc import PeerServiceStub
from kvpush_client.events import Fault, Reason
from kvpushd.errors import Invalid, KvpushError, OverLimit, Unreachable, Unsupported
from kvpushd.rpc import status
from kvpushd.rpc.tls import Options, PeerSecurity

PROTOCOL = 1
# Names end up in logs and tables, and next to the names of certificates.
NODE = r"[A-Za-z0-9._-]{1,253}"
# What gRPC reads at the end of a stream.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
# A link's silence as either side may ask for it, in milliseconds.
SILENCE_MS = (100, 600_000)

Said = TypeVar("Said", peer_pb2.ReceiverItem, peer_pb2.SenderItem)
Result = TypeVar("Result")
Heard = TypeVar("Heard", peer_pb2.ReceiverItem, peer_pb2.SenderItem)


@dataclass(frozen=True, slots=True)
class Terms:
    """What this node says of itself on every link, and the bounds that it holds to. Times in seconds."""

    node: str
    boot: bytes
    software: str
    silence: float = 3.0
    connect_timeout: float = 5.0
    message_bytes: int = 16 << 20
    items_per_message: int = 4096
    queued_items: int = 65536

    def hello(self) -> peer_pb2.PeerHello:
        """The first message."""
        return peer_pb2.PeerHello(
            protocol=PROTOCOL,
            node=self.node,
            boot=self.boot,
            software=self.software,
            silence_ms=round(self.silence * 1000),
        )

    def options(self) -> Options:
        """Channel and server options that every link has."""
        return (
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", self.message_bytes),
            # Links are between nodes, never through the proxy that the environment names.
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            # Else channels of one process share connections, and with them the back-off after a failure:
            # a peer that came back at once could not be dialed for a second.
            ("grpc.use_local_subchannel_pool", 1),
        )


def check_hello(message: peer_pb2.LinkRequest | peer_pb2.LinkResponse) -> peer_pb2.PeerHello:
    """The hello that a link must begin with. Raises Invalid or Unsupported."""
    if not message.HasField("hello") or message.items:
        raise Invalid("a link begins with a message that holds a hello and nothing else")
    hello = message.hello
    if hello.protocol != PROTOCOL:
        raise Unsupported(
            f"the peer ({hello.software!r}) speaks protocol {hello.protocol}, this node {PROTOCOL}: "
            "upgrade the older one"
        )
    if not re.fullmatch(NODE, hello.node):
        raise Invalid("hello.node must have 1 to 253 letters, digits, dots, dashes and underscores")
    if len(hello.software) > 200 or not hello.software.isprintable():
        raise Invalid("hello.software must have at most 200 printable characters")
    if len(hello.boot) != 16:
        raise Invalid(f"hello.boot must have 16 bytes, not {len(hello.boot)}")
    least, most = SILENCE_MS
    if not least <= hello.silence_ms <= most:
        raise Invalid(f"hello.silence_ms is {hello.silence_ms}; allowed: {least} to {most}")
    return hello


class Wire(Generic[Said, Heard]):
    """One end of a link that is past its hellos, or waits for them: what is sent by then is queued."""

    def __init__(
        self,
        terms: Terms,
        beat: Callable[[], Said],
        pack: Callable[[Sequence[Said]], Any],
    ) -> None:
        self._terms = terms
        self._beat: Callable[[], Said] = beat
        self._pack: Callable[[Sequence[Said]], Any] = pack
        self._queue: deque[tuple[Said, int]] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._over: asyncio.Future[KvpushError] = asyncio.get_running_loop().create_future()
        self._heard_at = 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing will be carried any more."""
        return self._over.done()

    def send(self, item: Said) -> None:
        """Queues an item; never blocks. After the end nothing happens.

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
        self._wake.set()

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
            for item in message.items:
                kind = item.WhichOneof("item")
                if kind is None:
                    raise Invalid("an item that says nothing, or what this version does not know")
                if kind != "beat":
                    heard(item)
        raise Unreachable("the peer closed the link")

    async def _write(self, write: Callable[[Any], Awaitable[None]], every: float) -> None:
        while True:
            try:
                async with asyncio.timeout(every):
                    await self._wake.wait()
            except TimeoutError:
                await write(self._pack([self._beat()]))
                continue
            batch = self._take()
            await write(self._pack(batch))

    def _take(self) -> list[Said]:
        batch: list[Said] = []
        room = self._terms.message_bytes
        while self._queue and len(batch) < self._terms.items_per_message:
            item, size = self._queue[0]
            if batch and size > room:
                break
            self._queue.popleft()
            self._queued_bytes -= size
            room -= size
            batch.append(item)
        if not self._queue:
            self._wake.clear()
        return batch

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        silence = self._terms.silence
        while True:
            expected = loop.time() + silence / 8
            await asyncio.sleep(silence / 8)
            late = loop.time() - expected
            if late > silence / 8:
                # This process stood still (a stopped VM, a debugger): that is no silence of the peer's,
                # whose beats wait in the socket.
                self._heard_at += late
            if loop.time() - self._heard_at > silence:
                raise Unreachable(f"the peer was silent for {silence:g} s")

    async def _ended(self) -> None:
        raise await self._over


_OutWire = Wire[peer_pb2.ReceiverItem, peer_pb2.SenderItem]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A link past its hellos."""

    channel: grpc.aio.Channel
    call: Any
    hello: peer_pb2.PeerHello


class OutDesk(Protocol):
    """Who hears of the links that this node made. All is called on the loop."""

    def on_up(self, link: OutLink, hello: peer_pb2.PeerHello) -> None:
        """The peer answered. At most once per link."""

    def on_item(self, link: OutLink, item: peer_pb2.SenderItem) -> None:
        """The peer said something. A KvpushError raised here ends the link."""

    def on_down(self, link: OutLink, fault: Fault) -> None:
        """The link is over, or never came up. Exactly once per dial, unless all links are closed."""


class OutLink:
    """A link to the node that sends. Once it is down it stays so; dial again for another."""

    def __init__(self, address: str, wire: _OutWire) -> None:
        self.address = address
        self.hello: peer_pb2.PeerHello | None = None
        self._wire = wire

    def __repr__(self) -> str:
        return f"<OutLink {self.address} {'up' if self.up else 'not up'}>"

    @property
    def up(self) -> bool:
        """Whether hellos were exchanged and the link has not ended."""
        return self.hello is not None and not self._wire.ended

    def send(self, item: peer_pb2.ReceiverItem) -> None:
        """Queues an item, also before the link is up; never blocks; does nothing once it is down.

        Raises OverLimit if the item alone is larger than a message may be.
        """
        self._wire.send(item)

    def close(self, detail: str) -> None:
        """Gives the link up; what is queued is lost, and `on_down` follows."""
        self._wire.end(Unreachable(detail))


class Links:
    """All links that this node made: one per address, shared by all engines."""

    def __init__(self, terms: Terms, security: PeerSecurity, desk: OutDesk) -> None:
        self._terms = terms
        self._security = security
        self._desk = desk
        self._links: dict[str, tuple[OutLink, asyncio.Task[None]]] = {}
        self._log = structlog.get_logger("kvpushd.links")

    def __iter__(self) -> Iterator[OutLink]:
        return iter([link for link, _ in self._links.values()])

    def dial(self, address: str) -> OutLink:
        """The link to "host:port" that is up or coming up, or a new one.

        Returns at once; on_up or on_down follows, never from inside this call. Raises Invalid if the
        address is none.
        """
        check_address(address)
        known = self._links.get(address)
        if known is not None:
            return known[0]
        wire = _OutWire(
            self._terms,
            lambda: peer_pb2.ReceiverItem(beat=peer_pb2.Beat()),
            lambda items: peer_pb2.LinkRequest(items=items),
        )
        link = OutLink(address, wire)
        task = asyncio.get_running_loop().create_task(self._run(link, wire), name=f"link to {address}")
        self._links[address] = (link, task)
        return link

    async def close(self) -> None:
        """Ends all links without a word to the desk."""
        tasks = [task for _, task in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()

    async def _run(self, link: OutLink, wire: _OutWire) -> None:
        try:
            await self._carry(link, wire)
        except asyncio.CancelledError:
            wire.end(Unreachable("the node ends"))
            raise
        except KvpushError as error:
            fault = error.fault()
        except grpc.aio.AioRpcError as error:
            fault = status.fault_of(error)
        except TimeoutError:
            fault = Fault(
                Reason.PEER_UNREACHABLE,
                f"{link.address} did not answer within {self._terms.connect_timeout:g} s",
            )
        except asyncio.InvalidStateError as error:  # gRPC's word for a write to a call that is over
            fault = Fault(Reason.PEER_UNREACHABLE, f"the link to {link.address} broke: {error}")
        except Exception as error:  # noqa: BLE001, logged with its traceback
            # A bug in what the desk does ends this link, not the daemon and its other links.
            self._log.exception("link failed", address=link.address)
            fault = Fault(Reason.PEER_UNREACHABLE, f"internal error: {error!r}")
        wire.end(Unreachable(fault.detail))
        del self._links[link.address]
        self._log.warning("link down", address=link.address, reason=fault.reason.name, detail=fault.detail)
        self._desk.on_down(link, fault)

    async def _carry(self, link: OutLink, wire: _OutWire) -> None:
        opened = await wire.unless_ended(self._open(link.address))
        try:
            link.hello = opened.hello
            self._log.info(
                "link up", address=link.address, node=opened.hello.node, software=opened.hello.software
            )
            self._desk.on_up(link, opened.hello)
            await wire.run(
                opened.call.read,
                opened.call.write,
                opened.hello.silence_ms / 1000,
                lambda item: self._desk.on_item(link, item),
            )
        finally:
            await opened.channel.close(None)

    async def _open(self, address: str) -> _Opened:
        channel: grpc.aio.Channel | None = None
        try:
            async with asyncio.timeout(self._terms.connect_timeout):
                channel, names = await self._security.connect(address, self._terms.options())
                stub: Any = PeerServiceStub(channel)  # the stubs know no read and write
                call = stub.Link()
                await call.write(peer_pb2.LinkRequest(hello=self._terms.hello()))
                first = await call.read()
            if first is EOF:
                raise Unreachable(f"{address} closed the link")
            hello = check_hello(first)
            self._security.admit(hello.node, names)
            opened = _Opened(channel, call, hello)
            channel = None
            return opened
        finally:
            if channel is not None:
                await channel.close(None)


def check_address(address: str) -> None:
    """Raises Invalid unless `address` is "host:port": the host a name, IPv4, or IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    if re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536:
        if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})", host):
            return
        if host.startswith("[") and host.endswith("]"):
            try:
                ipaddress.IPv6Address(host[1:-1])
            except ValueError:
                raise Invalid(f"{address!r} holds no IPv6 address") from None
            return
    raise Invalid(f"{address!r} is no address of a peer: expected host:port")
