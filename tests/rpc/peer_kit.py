# SPDX-License-Identifier: Apache-2.0
"""Two nodes' ends of links on one loop, and desks that write down what they hear."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from kvpush_client._proto import peer_pb2, types_pb2
from kvpush_client.events import Fault
from kvpushd.rpc.links import Links, OutLink
from kvpushd.rpc.peer import InLink, PeerService, serve_peers
from kvpushd.rpc.terms import Terms
from kvpushd.rpc.tls import InsecurePeers, PeerSecurity

ANYBODY = InsecurePeers(("*",))
PATIENCE = 20.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine, with a deadline over all of it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        asyncio.run(within())

    return run


async def soon(waited: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await waited


def terms(node: str, **changed: Any) -> Terms:
    return Terms(node=node, boot=os.urandom(16), software="test", **changed)


@dataclass
class OutNotes:
    """An OutDesk that writes everything down."""

    ups: asyncio.Queue[tuple[OutLink, peer_pb2.PeerHello]] = field(default_factory=asyncio.Queue)
    items: asyncio.Queue[peer_pb2.SenderItem] = field(default_factory=asyncio.Queue)
    downs: asyncio.Queue[tuple[OutLink, Fault]] = field(default_factory=asyncio.Queue)
    raises: Exception | None = None

    def on_up(self, link: OutLink, hello: peer_pb2.PeerHello) -> None:
        self.ups.put_nowait((link, hello))

    def on_item(self, link: OutLink, item: peer_pb2.SenderItem) -> None:
        if self.raises:
            raise self.raises
        self.items.put_nowait(item)

    def on_down(self, link: OutLink, fault: Fault) -> None:
        self.downs.put_nowait((link, fault))


@dataclass
class InNotes:
    """A PeerDesk that writes everything down."""

    ups: asyncio.Queue[InLink] = field(default_factory=asyncio.Queue)
    items: asyncio.Queue[peer_pb2.ReceiverItem] = field(default_factory=asyncio.Queue)
    downs: asyncio.Queue[tuple[InLink, Fault]] = field(default_factory=asyncio.Queue)
    refused: asyncio.Queue[Fault] = field(default_factory=asyncio.Queue)
    raises: Exception | None = None

    def on_up(self, link: InLink) -> None:
        self.ups.put_nowait(link)

    def on_item(self, link: InLink, item: peer_pb2.ReceiverItem) -> None:
        if self.raises:
            raise self.raises
        self.items.put_nowait(item)

    def on_down(self, link: InLink, fault: Fault) -> None:
        self.downs.put_nowait((link, fault))

    def on_refused(self, address: str, fault: Fault) -> None:
        self.refused.put_nowait(fault)


@dataclass
class Sender:
    """A node that takes links."""

    notes: InNotes
    service: PeerService
    server: grpc.aio.Server
    port: int
    address: str


@asynccontextmanager
async def sending(
    node: str = "sender",
    security: PeerSecurity = ANYBODY,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    most_links: int = 1024,
    **changed: Any,
) -> AsyncIterator[Sender]:
    said, notes = terms(node, **{"links_per_node": 1024, **changed}), InNotes()
    service = PeerService(said, security, notes, most_links=most_links)
    server, bound = await serve_peers(service, health_aio.HealthServicer(), security, said, f"{host}:{port}")
    try:
        yield Sender(notes, service, server, bound, f"{host}:{bound}")
    finally:
        await server.stop(None)


@asynccontextmanager
async def receiving(
    node: str = "receiver", security: PeerSecurity = ANYBODY, **changed: Any
) -> AsyncIterator[tuple[Links, OutNotes]]:
    notes = OutNotes()
    links = Links(terms(node, **changed), security, notes)
    try:
        yield links, notes
    finally:
        await links.close()


def withdraw(number: int, padding: int = 0) -> peer_pb2.ReceiverItem:
    key = types_pb2.TransferKey(transfer_id=number.to_bytes(16, "big"))
    fault = types_pb2.Fault(detail="x" * padding)
    return peer_pb2.ReceiverItem(withdraw=peer_pb2.Withdraw(key=key, fault=fault))


def fenced(number: int) -> peer_pb2.SenderItem:
    key = types_pb2.TransferKey(transfer_id=number.to_bytes(16, "big"))
    return peer_pb2.SenderItem(fenced=peer_pb2.SenderFenced(key=key))


def ended(number: int, padding: int = 0) -> peer_pb2.SenderItem:
    key = types_pb2.TransferKey(transfer_id=number.to_bytes(16, "big"))
    return peer_pb2.SenderItem(
        ended=peer_pb2.SenderEnded(key=key, fault=types_pb2.Fault(detail="x" * padding))
    )


def number_of(item: peer_pb2.ReceiverItem | peer_pb2.SenderItem) -> int:
    said = getattr(item, str(item.WhichOneof("item")))
    return int.from_bytes(said.key.transfer_id, "big")
