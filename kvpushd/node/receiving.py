# SPDX-License-Identifier: Apache-2.0
"""The receiving side of links: dials senders' nodes, opens inlets for them, and tells them what is wanted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from kvpush_client._proto import peer_pb2, types_pb2
from kvpush_client.events import Fault
from kvpushd.core.events import (
    InletClosed,
    LinkLost,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    Reached,
)
from kvpushd.core.instructions import CloseInlet, Reach, SayAnnounce, SayReceiverGone, SayWithdraw
from kvpushd.core.reservation import UNFENCED, Reservation
from kvpushd.core.words import Incarnation, LinkId
from kvpushd.errors import Invalid, KvpushError, MoverDied, Unreachable
from kvpushd.node.engines import EngineEntry, EngineRoom
from kvpushd.node.hub import Hub
from kvpushd.node.movers import Movers
from kvpushd.node.tasks import Tasks
from kvpushd.rpc import wire
from kvpushd.rpc.links import Links, OutLink
from kvpushd.rpc.peer_wire import times_from_wire

InletKey = tuple[LinkId, Incarnation]
RouteKey = tuple[LinkId, Incarnation, str]
Question = tuple[Incarnation, str]

FAULTS_KEPT = 256
"""Addresses of which is remembered why their link went down last."""


@dataclass(frozen=True, slots=True)
class OpenInlet:
    """A receiving agent, and what its peer must know of it."""

    inlet_id: int
    inlet: types_pb2.Inlet
    pools: tuple[peer_pb2.RankPool, ...]


@dataclass(slots=True)
class Way:
    """One link as this room keeps it."""

    link: OutLink
    up: asyncio.Future[None]
    questions: dict[Question, deque[asyncio.Future[Fault | None]]] = field(default_factory=dict)
    """What was asked and not answered. The peer answers in the order of the questions, so one that nobody
    waits for any more stays, lest its answer be taken for the next one's."""


class ReceivingRoom:
    """Carries out what the ledger's receiver wants (OutDesk of the links)."""

    def __init__(
        self,
        hub: Hub,
        movers: Movers,
        engines: EngineRoom,
        agent_prefix: str,
        on_lost: Callable[[str, Fault], None],
        on_fence: Callable[[], None],
    ) -> None:
        """`agent_prefix` makes inlets' names unique among all nodes and for ever; `on_lost` hears of links
        that are down, with this side's role on them, `on_fence` of inlets destroyed to fence blocks."""
        self._hub = hub
        self._movers = movers
        self._engines = engines
        self._agent_prefix = agent_prefix
        self._on_lost = on_lost
        self._on_fence = on_fence
        self._links: Links | None = None
        self._ways: dict[str, Way] = {}
        self._inlets: dict[InletKey, asyncio.Task[OpenInlet]] = {}
        self._reaching: dict[RouteKey, asyncio.Task[None]] = {}
        self._faults: dict[str, str] = {}
        self._tasks = Tasks("receiving")
        self._log = structlog.get_logger("kvpushd.receiving")
        hub.on(Reach, self._reach)
        hub.on(CloseInlet, self._close_inlet)
        hub.on(SayAnnounce, self._announce)
        hub.on(SayWithdraw, self._withdraw)
        hub.on(SayReceiverGone, self._gone)

    def use(self, links: Links) -> None:
        """Where links come from; said once, before the first event."""
        self._links = links

    def __iter__(self) -> Iterator[OutLink]:
        return iter([way.link for _, way in sorted(self._ways.items())])

    @property
    def faults(self) -> dict[str, str]:
        """Why links went down last, by address."""
        return dict(self._faults)

    async def close(self) -> None:
        """Ends all links."""
        await self._tasks.close()
        if self._links is not None:
            await self._links.close()

    # --- reaching ----------------------------------------------------------------------------------------

    def _dial(self, address: str) -> Way:
        way = self._ways.get(address)
        if way is None:
            if self._links is None:
                raise Unreachable("this node has no peers configured: it serves engines on the node only")
            link = self._links.dial(address)
            way = self._ways[address] = Way(link, asyncio.get_running_loop().create_future())
            way.up.add_done_callback(lambda up: up.cancelled() or up.exception())  # not everybody awaits it
        return way

    def _reach(self, reach: Reach) -> None:
        route = (reach.link, reach.incarnation, reach.sender_engine_id)
        task = self._reaching[route] = self._tasks.start(self._open(reach))
        task.add_done_callback(lambda done: self._reached(route, done))

    def _reached(self, route: RouteKey, done: asyncio.Task[None]) -> None:
        if self._reaching.get(route) is done:
            del self._reaching[route]

    async def _open(self, reach: Reach) -> None:
        fault: Fault | None
        dialed = False
        try:
            way = self._dial(reach.link)
            dialed = True
            fault = await self._describe(reach, way)
        except KvpushError as error:
            fault = error.fault()
        self._hub.feed(Reached(reach.link, reach.incarnation, reach.sender_engine_id, fault))
        if not dialed and fault is not None:
            # There is no link whose end would say that nothing comes of it.
            self._hub.feed(LinkLost(reach.link, fault.detail))

    async def _describe(self, reach: Reach, way: Way) -> Fault | None:
        """Opens the inlet, presents the engine to its sender, and returns the sender's verdict."""
        entry = self._engines.get(reach.incarnation)
        if entry is None or not entry.live:
            raise Unreachable("the engine left")
        await asyncio.shield(way.up)
        opened = await asyncio.shield(self._inlet((reach.link, reach.incarnation), entry))
        if not way.link.up:
            raise Unreachable(f"{reach.link}: the link went down")
        item = peer_pb2.ReceiverEngine(
            engine_id=entry.engine_id,
            incarnation=entry.incarnation,
            sender_engine_id=reach.sender_engine_id,
            fingerprint=wire.fingerprint_to_wire(entry.identity.fingerprint),
            inlets=[opened.inlet],
            pools=opened.pools,
            world_size=entry.identity.world_size,
        )
        way.link.send(peer_pb2.ReceiverItem(engine=item))
        answer: asyncio.Future[Fault | None] = asyncio.get_running_loop().create_future()
        way.questions.setdefault((reach.incarnation, reach.sender_engine_id), deque()).append(answer)
        return await answer

    def _inlet(self, key: InletKey, entry: EngineEntry) -> asyncio.Task[OpenInlet]:
        """The inlet of a link into an engine: the one that is there, or coming, or a new one."""
        opening = self._inlets.get(key)
        if opening is None:
            opening = self._inlets[key] = self._tasks.start(self._open_inlet(entry))
            opening.add_done_callback(lambda done: self._opened(key, done))
        return opening

    def _opened(self, key: InletKey, done: asyncio.Task[OpenInlet]) -> None:
        # One that failed must not fail all who come later.
        failed = done.cancelled() or done.exception() is not None
        if failed and self._inlets.get(key) is done:
            del self._inlets[key]

    async def _open_inlet(self, entry: EngineEntry) -> OpenInlet:
        inlet_id = self._movers.next_id()
        pools = [pool for _, pool in sorted(entry.pools.items())]
        inlet, bases = await self._movers.open_inlet(
            inlet_id, [pool.pool_id for pool in pools], f"{self._agent_prefix}-{inlet_id}"
        )
        return OpenInlet(
            inlet_id,
            inlet,
            tuple(
                peer_pb2.RankPool(rank=pool.rank, base=base, layout=wire.layout_to_wire(pool.layout))
                for pool, base in zip(pools, bases, strict=True)
                if pool.layout is not None
            ),
        )

    # --- fencing -----------------------------------------------------------------------------------------

    def _close_inlet(self, close: CloseInlet) -> None:
        key = (close.link, close.incarnation)
        if any(half.parts.get(close.link) in UNFENCED for half in self._halves_of(close.incarnation)):
            self._on_fence()
        # Whoever still reaches through it would present what is about to be no more, or, with the link coming
        # up later, open it behind the fence.
        for route in [route for route in self._reaching if route[:2] == key]:
            self._reaching.pop(route).cancel()
        self._tasks.start(self._fence(key, self._inlets.pop(key, None)))

    def _halves_of(self, incarnation: Incarnation) -> list[Reservation]:
        return [half for half in self._hub.ledger.reservations() if half.incarnation == incarnation]

    async def _fence(self, key: InletKey, opening: asyncio.Task[OpenInlet] | None) -> None:
        if opening is not None:
            try:
                opened = await asyncio.shield(opening)
                await self._movers.close_inlet(opened.inlet_id)
            except MoverDied as error:
                self._log.info("the inlet was closed by the mover's death", why=str(error))
            except KvpushError as error:
                self._log.info("the inlet to close was never opened", why=str(error))
        # Each order is answered once, also where the mover's death did it: until then the ledger opens no
        # other under this key, so the answer can't be taken for the next one's.
        self._hub.feed(InletClosed(*key))

    def forget_inlets(self) -> None:
        """The mover died, and all inlets with it."""
        for task in self._reaching.values():
            task.cancel()
        self._reaching.clear()
        self._inlets.clear()

    # --- links (OutDesk) ---------------------------------------------------------------------------------

    def on_up(self, link: OutLink, hello: peer_pb2.PeerHello) -> None:
        """The sender's node answered."""
        way = self._ways.get(link.address)
        if way is not None and not way.up.done():
            way.up.set_result(None)

    def on_down(self, link: OutLink, fault: Fault) -> None:
        """Whoever waits for the link hears so; what was announced on it ends."""
        way = self._ways.pop(link.address, None)
        self._faults.pop(link.address, None)
        self._faults[link.address] = str(fault)
        while len(self._faults) > FAULTS_KEPT:
            del self._faults[next(iter(self._faults))]
        self._on_lost("receiving", fault)
        detail = f"{link.address}: {fault.detail}"
        if way is not None:
            waits: list[asyncio.Future[None] | asyncio.Future[Fault | None]] = [way.up]
            waits.extend(answer for asked in way.questions.values() for answer in asked)
            for future in waits:
                if not future.done():
                    future.set_exception(Unreachable(detail))
                    future.exception()
        self._hub.feed(LinkLost(LinkId(link.address), detail))

    def on_item(self, link: OutLink, item: peer_pb2.SenderItem) -> None:
        """What the sender says, as the ledger's event. Raises Invalid where it says nothing valid."""
        name = LinkId(link.address)
        kind = item.WhichOneof("item")
        if kind == "beat":
            return
        if kind == "engine_answer":
            self._answered(link, item.engine_answer)
            return
        if kind is None:
            raise Invalid("an item that says nothing: the peer speaks a later version")
        body = getattr(item, kind)
        incarnation, key = wire.incarnation_from_wire(body.incarnation), wire.key_from_wire(body.key)
        match kind:
            case "matched":
                self._hub.feed(PeerMatched(name, incarnation, key))
            case "moving":
                self._hub.feed(PeerMoving(name, incarnation, key))
            case "landed":
                counts, times = wire.counts_from_wire(body.counts), times_from_wire(body.times)
                self._hub.feed(PeerLanded(name, incarnation, key, counts, times))
            case "ended":
                fault = wire.fault_from_wire(body.fault)
                self._hub.feed(PeerEnded(name, incarnation, key, fault, body.fenced))
            case "fenced":
                self._hub.feed(PeerFenced(name, incarnation, key))

    def _answered(self, link: OutLink, answer: peer_pb2.ReceiverEngineAnswer) -> None:
        way = self._ways.get(link.address)
        question = (wire.incarnation_from_wire(answer.incarnation), answer.sender_engine_id)
        asked = way.questions.get(question) if way else None
        if way is None or not asked:
            raise Invalid("an answer to a question that was never asked")
        waiting = asked.popleft()
        if not asked:
            del way.questions[question]
        if not waiting.done():
            waiting.set_result(wire.fault_from_wire(answer.fault) if answer.HasField("fault") else None)

    # --- what is said ------------------------------------------------------------------------------------

    def _say(self, link: LinkId, item: peer_pb2.ReceiverItem) -> None:
        way = self._ways.get(link)
        if way is not None:
            way.link.send(item)

    def _announce(self, say: SayAnnounce) -> None:
        said = say.announced
        item = peer_pb2.Announce(
            key=wire.key_to_wire(said.key),
            incarnation=said.incarnation,
            sender_engine_id=said.sender_engine_id,
            start=said.start,
            end=said.end,
            blocks=wire.blocks_to_wire(said.blocks),
            priority=said.priority,
            prompt=said.prompt,
        )
        try:
            self._say(said.link, peer_pb2.ReceiverItem(announce=item))
        except KvpushError as error:  # too large for a message
            ended = PeerEnded(said.link, said.incarnation, said.key, error.fault(), fenced=True)
            self._hub.feed(ended)

    def _withdraw(self, say: SayWithdraw) -> None:
        said = say.withdrawn
        item = peer_pb2.Withdraw(
            key=wire.key_to_wire(said.key),
            incarnation=said.incarnation or b"",
            sender_engine_id=said.sender_engine_id,
            fault=wire.fault_to_wire(said.fault),
        )
        if said.incarnation is None:
            try:
                # Nothing was announced, so there may be no link yet; the word is worth one: without it the
                # sender's blocks wait for their lease.
                self._dial(said.link)
            except KvpushError as error:
                self._log.info("a sender can't be told that nothing is wanted", why=str(error))
                return
        self._say(said.link, peer_pb2.ReceiverItem(withdraw=item))

    def _gone(self, say: SayReceiverGone) -> None:
        item = peer_pb2.ReceiverEngineGone(incarnation=say.gone.incarnation)
        self._say(say.gone.link, peer_pb2.ReceiverItem(engine_gone=item))
