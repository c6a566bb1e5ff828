# SPDX-License-Identifier: Apache-2.0
"""The gRPC service that other daemons call: the sending side of links. It checks, and decides nothing."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from kvpush_client._proto import peer_pb2, peer_pb2_grpc
from kvpush_client.events import Fault, Reason
from kvpushd.errors import Invalid, KvpushError, OverLimit, Unreachable
from kvpushd.rpc import status
from kvpushd.rpc.link import EOF, Wire
from kvpushd.rpc.terms import Terms, check_hello
from kvpushd.rpc.tls import PeerSecurity

_InWire = Wire[peer_pb2.SenderItem, peer_pb2.ReceiverItem]

HANDSHAKE = 10.0
"""Seconds that a connection has for its handshake; who dials gives it connect_timeout, 5 s."""
IDLE = 60.0
"""Seconds that a connection may be open without a call. A link is one."""
MOST_CONNECTIONS = 4096


class InLink:
    """A link that a receiving node made. Once it is down it stays so."""

    def __init__(
        self, address: str, hello: peer_pb2.PeerHello, names: tuple[str, ...], wire: _InWire
    ) -> None:
        self.address = address
        """Where it came from: host and an ephemeral port."""
        self.hello = hello
        self.names = names
        """What its certificate proved; empty where links are insecure."""
        self._wire = wire

    def __repr__(self) -> str:
        return f"<InLink {self.hello.node} {self.address} {'up' if self.up else 'down'}>"

    @property
    def up(self) -> bool:
        """Whether the link has not ended."""
        return not self._wire.ended

    def send(self, item: peer_pb2.SenderItem, *, hurry: bool = True) -> None:
        """Queues an item; never blocks; does nothing once the link is down. One in no `hurry` waits a moment
        for others to go with.

        Raises OverLimit if the item alone is larger than a message may be.
        """
        self._wire.send(item, hurry=hurry)

    def close(self, detail: str) -> None:
        """Gives the link up; what is queued is lost, and `on_down` follows."""
        self._wire.end(Unreachable(detail))


class PeerDesk(Protocol):
    """Who hears of the links that other nodes made. All is called on the loop."""

    def on_up(self, link: InLink) -> None:
        """A node linked. Once per link."""

    def on_item(self, link: InLink, item: peer_pb2.ReceiverItem) -> None:
        """The node said something. A KvpushError raised here ends the link; the node is told."""

    def on_down(self, link: InLink, fault: Fault) -> None:
        """The link is over. Exactly once per on_up."""

    def on_refused(self, address: str, fault: Fault) -> None:
        """Somebody who is no peer, or speaks no sense, was turned away before any on_up."""


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """Takes links. One that misbehaves gets a status that says why; the others do not notice."""

    def __init__(
        self,
        terms: Terms,
        security: PeerSecurity,
        desk: PeerDesk,
        *,
        most_links: int = 1024,
    ) -> None:
        """`most_links` in all; of one node fewer, so that none keeps the others out."""
        self._terms = terms
        self._security = security
        self._desk = desk
        self._most_links = most_links
        self._links: set[InLink] = set()
        self._log = structlog.get_logger("kvpushd.peer")

    def __iter__(self) -> Iterator[InLink]:
        return iter(sorted(self._links, key=lambda link: (link.hello.node, link.address)))

    def refused(self, error: KvpushError) -> None:
        """A call beside the links that made no sense."""
        self._desk.on_refused("a caller", error.fault())

    async def Link(  # type: ignore[override]  # noqa: N802, the proto's name
        self, request_iterator: Any, context: Any
    ) -> None:
        """One link, from its hello to its end."""
        address = _plain(context.peer())
        try:
            link, wire = await self._take_in(address, context)
        except KvpushError as error:
            self._desk.on_refused(address, error.fault())
            await status.abort(context, error)
            return
        fault = Fault(Reason.PEER_UNREACHABLE, f"the link from {link.hello.node} broke")
        failure: KvpushError | None = None
        try:
            self._desk.on_up(link)
            await wire.run(
                partial(status.read, context),
                context.write,
                link.hello.silence_ms / 1000,
                lambda item: self._desk.on_item(link, item),
            )
        except KvpushError as error:
            failure, fault = error, error.fault()
        except Exception as error:  # noqa: BLE001, logged with its traceback
            # A bug in what the desk does ends this link, not the daemon and its other links.
            self._log.exception("link failed", address=address, node=link.hello.node)
            failure = Unreachable("internal error; the log of the other node has more")
            fault = Fault(Reason.PEER_UNREACHABLE, f"internal error: {error!r}")
        finally:
            wire.end(Unreachable(fault.detail))
            self._links.discard(link)
            self._log.info("link down", address=address, node=link.hello.node, fault=str(fault))
            self._desk.on_down(link, fault)
        if failure is not None:
            # Last: one that stands still may never take it, and nothing here waits for that.
            await status.abort(context, failure)

    async def _take_in(self, address: str, context: Any) -> tuple[InLink, _InWire]:
        """Hears a hello and answers it. The link counts from the hello on, not from when the answer is
        taken: else any number could come in between."""
        try:
            async with asyncio.timeout(self._terms.connect_timeout):
                first = await status.read(context)
        except TimeoutError:
            raise Invalid(f"no hello within {self._terms.connect_timeout:g} s") from None
        if first is EOF:
            raise Invalid("a link begins with a hello")
        hello = check_hello(first)
        names = self._security.names(context)
        self._security.admit(hello.node, names)
        if len(self._links) >= self._most_links:
            raise OverLimit(f"{self._most_links} links are open")
        most = self._terms.links_per_node
        if sum(link.hello.node == hello.node for link in self._links) >= most:
            raise OverLimit(f"{most} links from node {hello.node} are open: see limits.links_per_node")
        wire = _InWire(
            self._terms,
            lambda: peer_pb2.SenderItem(beat=peer_pb2.Beat()),
            lambda items, first: peer_pb2.LinkResponse(items=items, first=first),
        )
        link = InLink(address, hello, names, wire)
        self._links.add(link)
        try:
            async with asyncio.timeout(self._terms.connect_timeout):
                await context.write(peer_pb2.LinkResponse(hello=self._terms.hello()))
        except BaseException as error:
            self._links.discard(link)
            if isinstance(error, TimeoutError):
                raise Unreachable(f"{hello.node} did not take an answer to its hello") from None
            raise
        self._log.info("link up", address=address, node=hello.node, software=hello.software)
        return link, wire


async def serve_peers(
    service: PeerService,
    health: health_aio.HealthServicer,
    security: PeerSecurity,
    terms: Terms,
    address: str,
) -> tuple[grpc.aio.Server, int]:
    """Opens the peer port at "host:port"; returns the running server and its port. Keep the server.

    Raises ConfigError if the port is taken, or may not be opened without certificates.
    """
    server = grpc.aio.server(
        interceptors=(status.Decoding(service.refused),),
        options=(
            *terms.options(),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", round(1000 * min(HANDSHAKE, 2 * terms.connect_timeout))),
            ("grpc.max_connection_idle_ms", round(1000 * IDLE)),
            ("grpc.max_allowed_incoming_connections", _most_connections()),
        ),
        # Links are few and live long; more calls than that are no peer's.
        maximum_concurrent_rpcs=4096,
    )
    peer_pb2_grpc.add_PeerServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = security.listen(server, address)
    await server.start()
    return server, port


def _most_connections() -> int:
    """Else strangers, whom nothing keeps from connecting, could hold the descriptors that the node's engines
    need. A peer costs about eight in all: a quarter is more connections than there can be peers."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MOST_CONNECTIONS, files // 4))


def _plain(peer: str) -> str:
    """Host and port of gRPC's "ipv4:10.0.0.1:55555" or "ipv6:%5B::1%5D:55555"."""
    return re.sub(r"^ipv[46]:", "", unquote(peer))
