# SPDX-License-Identifier: Apache-2.0
"""Links to peers, as the receiving side makes them."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from kvpush_client._proto import peer_pb2
from kvpush_client._proto.peer_pb2_grpc import PeerServiceStub
from kvpush_client.events import Fault, Reason
from kvpushd.errors import Invalid, KvpushError, Unreachable
from kvpushd.logs import Sparing
from kvpushd.rpc import status
from kvpushd.rpc.ending import Ending
from kvpushd.rpc.link import EOF, Wire
from kvpushd.rpc.terms import Terms, check_hello
from kvpushd.rpc.tls import PeerSecurity

_OutWire = Wire[peer_pb2.ReceiverItem, peer_pb2.SenderItem]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A link past its hellos."""

    channel: grpc.aio.Channel
    call: Any
    ending: Ending
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


class Links:
    """All links that this node made: one per address, shared by all engines."""

    def __init__(self, terms: Terms, security: PeerSecurity, desk: OutDesk) -> None:
        self._terms = terms
        self._security = security
        self._desk = desk
        self._links: dict[str, tuple[OutLink, asyncio.Task[None]]] = {}
        self._log = structlog.get_logger("kvpushd.links")
        self._sparing = Sparing(self._log)

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
            lambda items, first: peer_pb2.LinkRequest(items=items, first=first),
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
        self._sparing.warning(
            f"{link.address} {fault.reason.name}",
            "link down",
            address=link.address,
            reason=fault.reason.name,
            detail=fault.detail,
        )
        self._desk.on_down(link, fault)

    async def _carry(self, link: OutLink, wire: _OutWire) -> None:
        opened = await wire.unless_ended(self._open(link.address))
        try:
            link.hello = opened.hello
            self._log.info(
                "link up", address=link.address, node=opened.hello.node, software=opened.hello.software
            )
            self._desk.on_up(link, opened.hello)
            async with opened.ending:
                await wire.run(
                    partial(status.answered, opened.call),
                    opened.call.write,
                    opened.hello.silence_ms / 1000,
                    lambda item: self._desk.on_item(link, item),
                )
        finally:
            await opened.channel.close(None)

    def _call(self, channel: grpc.aio.Channel) -> Any:
        """Begins a stream: something to read, write and cancel."""
        stub: Any = PeerServiceStub(channel)  # the stubs know no read and write
        return stub.Link()

    async def _open(self, address: str) -> _Opened:
        channel: grpc.aio.Channel | None = None
        try:
            async with asyncio.timeout(self._terms.connect_timeout):
                channel, names = await self._security.connect(address, self._terms.options())
                call = self._call(channel)
                ending = Ending(call)
                async with ending:
                    await call.write(peer_pb2.LinkRequest(hello=self._terms.hello()))
                    first = await status.answered(call)
            if first is EOF:
                raise Unreachable(f"{address} closed the link")
            hello = check_hello(first)
            self._security.admit(hello.node, names)
            opened = _Opened(channel, call, ending, hello)
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
