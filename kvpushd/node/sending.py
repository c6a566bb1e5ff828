# SPDX-License-Identifier: Apache-2.0
"""The sending side of links: takes receivers' nodes in, opens outlets to their inlets, and posts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from kvpush_client._proto import peer_pb2
from kvpush_client.events import Fault
from kvpush_client.layout import Layout
from kvpushd.core import layout as layouts
from kvpushd.core.engines import is_local
from kvpushd.core.events import (
    Announced,
    Described,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    Reached,
    ReceiverGone,
    ReceiverLost,
    Withdrawn,
)
from kvpushd.core.instructions import CloseOutlet, Post, SayPeer, SayReached
from kvpushd.core.words import Incarnation, LinkId, ReceiverView
from kvpushd.errors import Duplicate, Invalid, KvpushError, OverLimit
from kvpushd.mover.handle import OutletPool
from kvpushd.node.engines import EngineRoom
from kvpushd.node.hub import Hub
from kvpushd.node.movers import Movers
from kvpushd.node.tasks import Tasks
from kvpushd.rpc import wire
from kvpushd.rpc.peer import InLink
from kvpushd.rpc.peer_wire import times_to_wire
from kvpushd.rpc.terms import agent_prefix

MAX_RANKS = 4096
MAX_INLETS = 64
"""A node has an inlet per mover, and each that is opened costs its peer a connection."""
MAX_METADATA = 1 << 20
"""Bytes of an inlet's. NIXL's has some hundred, and a hundred more for each pool behind it."""
MOST_ADDRESS = (1 << 63) - 1
MAX_PRESENTATIONS = 4096
MAX_PRESENTED_BYTES = 64 << 20
"""Engines that may wait, of one link, to be presented, and what their descriptions may have together."""


@dataclass(slots=True)
class Outlet:
    """The way into one receiving engine: an outlet per inlet, and which pool lies behind which."""

    agents: tuple[str, ...]
    outlets: tuple[int, ...]
    pools: dict[int, tuple[int, bytes]]
    """Rank to (outlet id, pool id)."""
    used: bool = False
    """Some engine of ours sends to it."""


@dataclass(frozen=True, slots=True)
class Presented:
    """A receiving engine, as it presented itself; `where` has each rank's inlet's index and pool's base."""

    said: peer_pb2.ReceiverEngine
    receiver: ReceiverView
    where: dict[int, tuple[int, int]]


@dataclass(slots=True)
class Guest:
    """A link from a receiving node, under the name that the ledger knows."""

    link: InLink
    name: LinkId
    outlets: dict[Incarnation, Outlet] = field(default_factory=dict)
    inbox: asyncio.Queue[Presented | ReceiverGone] = field(
        default_factory=lambda: asyncio.Queue(MAX_PRESENTATIONS)
    )
    waiting_bytes: int = 0
    """Of the descriptions in the inbox."""
    attendant: asyncio.Task[None] | None = None


class SendingRoom:
    """Carries out what the ledger's sender wants (PeerDesk of the service)."""

    def __init__(
        self,
        hub: Hub,
        movers: Movers,
        engines: EngineRoom,
        on_refused: Callable[[str, Fault], None],
        on_lost: Callable[[str, Fault], None],
    ) -> None:
        self._hub = hub
        self._movers = movers
        self._engines = engines
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._guests: dict[InLink, Guest] = {}
        self._by_name: dict[LinkId, Guest] = {}
        self._links = 0
        self._tasks = Tasks("sending")
        self._log = structlog.get_logger("kvpushd.sending")
        hub.on(SayReached, self._answer)
        hub.on(SayPeer, self._say_peer)
        hub.on(Post, self._post)
        hub.on(CloseOutlet, self._close_outlet)

    def __iter__(self) -> Iterator[InLink]:
        return iter([guest.link for guest in self._guests.values()])

    def guests(self) -> list[Guest]:
        """The links, with the names under which the ledger knows them."""
        return list(self._guests.values())

    async def close(self) -> None:
        """Ends what is under way."""
        await self._tasks.close()

    def drop_links(self, detail: str) -> None:
        """The mover died, and all outlets with it: receivers have to present themselves anew."""
        for guest in list(self._guests.values()):
            guest.outlets.clear()
            guest.link.close(detail)

    # --- links (PeerDesk) --------------------------------------------------------------------------------

    def on_up(self, link: InLink) -> None:
        """A receiving node linked."""
        self._links += 1
        guest = Guest(link, LinkId(f"{link.hello.node}#{self._links}"))
        self._guests[link] = self._by_name[guest.name] = guest
        guest.attendant = self._tasks.start(self._attend(guest))

    def on_down(self, link: InLink, fault: Fault) -> None:
        """It is gone; what it announced ends, and the ways to it with their last writes."""
        guest = self._guests.pop(link)
        if guest.attendant is not None:
            guest.attendant.cancel()
        self._on_lost("sending", fault)
        self._hub.feed(ReceiverLost(guest.name, f"{link.hello.node}: {fault.detail}"))
        for incarnation in list(guest.outlets):
            self._forget_outlets(guest, incarnation)
        del self._by_name[guest.name]

    def on_refused(self, address: str, fault: Fault) -> None:
        """Somebody who is no peer was turned away."""
        self._on_refused(address, fault)

    def on_item(self, link: InLink, item: peer_pb2.ReceiverItem) -> None:
        """What the receiver says, as the ledger's event. Raises KvpushError where it says nothing valid."""
        guest = self._guests[link]
        match item.WhichOneof("item"):
            case "beat":
                return
            case "engine":
                self._queue(guest, Presented(item.engine, *_receiver_of(item.engine, link.hello)))
            case "announce":
                self._hub.feed(_announced(guest.name, item.announce))
            case "withdraw":
                body = item.withdraw
                incarnation = wire.incarnation_from_wire(body.incarnation) if body.incarnation else None
                key, fault = wire.key_from_wire(body.key), wire.fault_from_wire(body.fault)
                sender = wire.name_from_wire(body.sender_engine_id, "sender_engine_id")
                self._hub.feed(Withdrawn(guest.name, incarnation, key, sender, fault))
            case "engine_gone":
                gone = wire.incarnation_from_wire(item.engine_gone.incarnation)
                self._queue(guest, ReceiverGone(guest.name, gone))
            case None:
                raise Invalid("an item that says nothing: the peer speaks a later version")

    def _queue(self, guest: Guest, said: Presented | ReceiverGone) -> None:
        size = _size(said)
        waiting = guest.inbox.qsize()
        if guest.inbox.full() or (waiting and guest.waiting_bytes + size > MAX_PRESENTED_BYTES):
            raise OverLimit(
                f"{waiting} engines ({guest.waiting_bytes:,} bytes) wait to be presented on this link"
            )
        guest.inbox.put_nowait(said)
        guest.waiting_bytes += size

    async def _attend(self, guest: Guest) -> None:
        """Takes a link's receiving engines in and lets them go, one after the other: one that goes while its
        outlets are being opened goes after that; and answers come in the order of the questions."""
        while True:
            said = await guest.inbox.get()
            guest.waiting_bytes -= _size(said)
            if isinstance(said, ReceiverGone):
                self._hub.feed(said)
            else:
                await self._present(guest, said)

    async def _present(self, guest: Guest, presented: Presented) -> None:
        """Opens outlets into a receiving engine, then lets the ledger decide whether it fits."""
        receiver, name = presented.receiver, presented.said.sender_engine_id
        try:
            await self._open_outlets(guest, presented)
        except KvpushError as error:
            self._forget_outlets(guest, receiver.incarnation)
            self._answer(SayReached(Reached(guest.name, receiver.incarnation, name, error.fault())))
        else:
            self._hub.feed(Described(guest.name, receiver, name))

    async def _open_outlets(self, guest: Guest, presented: Presented) -> None:
        receiver, inlets = presented.receiver, presented.said.inlets
        agents = tuple(inlet.agent for inlet in inlets)
        known = guest.outlets.get(receiver.incarnation)
        if known is not None and known.agents == agents:
            return
        if known is not None:  # it has a new inlet, in place of one that was closed or died
            self._forget_outlets(guest, receiver.incarnation)
        self._check_unused(guest, agents)
        ids = tuple(self._movers.next_id() for _ in agents)
        outlet = Outlet(agents, ids, {})
        for rank, (at, _) in presented.where.items():
            outlet.pools[rank] = (ids[at], f"{ids[at]}/{rank}".encode())
        guest.outlets[receiver.incarnation] = outlet
        for index, (outlet_id, inlet) in enumerate(zip(ids, inlets, strict=True)):
            behind = [
                OutletPool(outlet.pools[rank][1], base, receiver.pools[rank])
                for rank, (at, base) in presented.where.items()
                if at == index
            ]
            await self._movers.open_outlet(outlet_id, inlet, behind)

    def _check_unused(self, guest: Guest, agents: tuple[str, ...]) -> None:
        """An agent is made for one link: of two ways to one, the end of either would be the end of both."""
        for other in self._guests.values():
            used = {agent for outlet in other.outlets.values() for agent in outlet.agents}
            if used.intersection(agents) or len(set(agents)) < len(agents):
                raise Duplicate(f"agents {', '.join(agents)} of {guest.link.hello.node} are in use already")

    def _close_outlet(self, close: CloseOutlet) -> None:
        guest = self._by_name.get(close.link)
        if guest is not None:
            self._forget_outlets(guest, close.incarnation)

    def _forget_outlets(self, guest: Guest, incarnation: Incarnation) -> None:
        outlet = guest.outlets.pop(incarnation, None)
        for closing in outlet.outlets if outlet else ():
            self._movers.close_outlet(closing)

    # --- writes ------------------------------------------------------------------------------------------

    def _post(self, post: Post) -> None:
        source = self._engines.pool_of(post.sender, post.source_rank)
        where = self._where(post)
        if source is None or where is None:
            self._movers.refuse(post)
            return
        outlet_id, target = where
        self._movers.post(post, source_pool=source, outlet_id=outlet_id, target_pool=target)

    def _where(self, post: Post) -> tuple[int, bytes] | None:
        if is_local(post.link):
            pool = self._engines.pool_of(post.receiver, post.target_rank)
            return (0, pool) if pool is not None else None
        guest = self._by_name.get(post.link)
        outlet = guest.outlets.get(post.receiver) if guest else None
        return outlet.pools.get(post.target_rank) if outlet else None

    # --- what is said ------------------------------------------------------------------------------------

    def _say(self, link: LinkId, item: peer_pb2.SenderItem, *, hurry: bool = True) -> None:
        guest = self._by_name.get(link)
        if guest is not None:
            guest.link.send(item, hurry=hurry)

    def _answer(self, say: SayReached) -> None:
        reached = say.reached
        guest = self._by_name.get(reached.link)
        outlet = guest.outlets.get(reached.incarnation) if guest else None
        if guest is not None and outlet is not None:
            outlet.used |= reached.fault is None
            if not outlet.used:  # it fits no engine of ours: there is nothing to send to it
                self._forget_outlets(guest, reached.incarnation)
        answer = peer_pb2.ReceiverEngineAnswer(
            incarnation=reached.incarnation, sender_engine_id=reached.sender_engine_id
        )
        if reached.fault is not None:
            answer.fault.CopyFrom(wire.fault_to_wire(reached.fault))
        self._say(reached.link, peer_pb2.SenderItem(engine_answer=answer))

    def _say_peer(self, say: SayPeer) -> None:
        item = say.item
        key, incarnation = wire.key_to_wire(item.key), item.incarnation
        match item:
            case PeerMatched():
                said = peer_pb2.SenderItem(matched=peer_pb2.SenderMatched(key=key, incarnation=incarnation))
            case PeerMoving():
                said = peer_pb2.SenderItem(moving=peer_pb2.SenderMoving(key=key, incarnation=incarnation))
            case PeerLanded():
                landed = peer_pb2.SenderLanded(
                    key=key,
                    incarnation=incarnation,
                    counts=wire.counts_to_wire(item.counts),
                    times=times_to_wire(item.times),
                )
                said = peer_pb2.SenderItem(landed=landed)
            case PeerEnded():
                ended = peer_pb2.SenderEnded(
                    key=key,
                    incarnation=incarnation,
                    fault=wire.fault_to_wire(item.fault),
                    fenced=item.fenced,
                )
                said = peer_pb2.SenderItem(ended=ended)
            case PeerFenced():
                said = peer_pb2.SenderItem(fenced=peer_pb2.SenderFenced(key=key, incarnation=incarnation))
        self._say(item.link, said, hurry=not isinstance(item, PeerMatched | PeerMoving))


def _receiver_of(
    engine: peer_pb2.ReceiverEngine, hello: peer_pb2.PeerHello
) -> tuple[ReceiverView, dict[int, tuple[int, int]]]:
    """The engine, and for each rank its inlet's index and its pool's base address. Raises Invalid."""
    incarnation = wire.incarnation_from_wire(engine.incarnation)
    wire.name_from_wire(engine.engine_id, "engine_id")
    wire.name_from_wire(engine.sender_engine_id, "sender_engine_id")
    if not 1 <= len(engine.pools) <= MAX_RANKS or not 1 <= len(engine.inlets) <= MAX_INLETS:
        raise Invalid(
            f"{len(engine.pools)} pools and {len(engine.inlets)} inlets; expected 1 to {MAX_RANKS} and 1 to "
            f"{MAX_INLETS}"
        )
    mine = agent_prefix(hello.node, hello.boot)
    for inlet in engine.inlets:
        wire.name_from_wire(inlet.agent, "inlet.agent", empty=True)
        wire.name_from_wire(inlet.transport, "inlet.transport")
        if len(inlet.metadata) > MAX_METADATA:
            raise Invalid(f"an inlet's metadata has {len(inlet.metadata):,} bytes, expected {MAX_METADATA:,}")
        if not inlet.agent.startswith(mine):
            # Agents are known by name: under another node's name it would take that node's place.
            raise Invalid(f"the agent {inlet.agent!r} is not of this node: expected {mine}...")
    pools: dict[int, Layout] = {}
    where: dict[int, tuple[int, int]] = {}
    for pool in engine.pools:
        if pool.rank in pools:
            raise Invalid(f"rank {pool.rank} is described twice")
        if pool.inlet >= len(engine.inlets):
            raise Invalid(f"rank {pool.rank} is behind inlet {pool.inlet}, of {len(engine.inlets)}")
        layout = wire.layout_from_wire(pool.layout)
        layouts.check(layout)
        if pool.base + layout.pool_bytes > MOST_ADDRESS:
            raise Invalid(f"rank {pool.rank} is at {pool.base:#x}, where no process has a pool")
        pools[pool.rank] = layout
        where[pool.rank] = (pool.inlet, pool.base)
    view = ReceiverView(
        engine.engine_id,
        incarnation,
        wire.fingerprint_from_wire(engine.fingerprint),
        max(engine.world_size, len(pools)),
        pools,
        hello.node,
    )
    return view, where


def _size(said: Presented | ReceiverGone) -> int:
    return said.said.ByteSize() if isinstance(said, Presented) else 0


def _announced(link: LinkId, body: peer_pb2.Announce) -> Announced:
    return Announced(
        link,
        wire.incarnation_from_wire(body.incarnation),
        wire.key_from_wire(body.key),
        wire.name_from_wire(body.sender_engine_id, "sender_engine_id"),
        body.start,
        body.end,
        wire.blocks_from_wire(body.blocks),
        body.priority,
        wire.digest_from_wire(body.prompt, "prompt"),
    )
