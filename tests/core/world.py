# SPDX-License-Identifier: Apache-2.0
"""A small world for ledgers: nodes, engines that use their blocks as vLLM does, links that are late and
break, and movers whose bytes land when they like. It holds the ledgers to what engines rely on.

Nothing happens by itself: what is under way waits in queues until a test carries it on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvpush_client.events import Fault, Reason, Side, TransferKey
from kvpush_client.layout import Group, Layout
from kvpushd.core.engines import Limits
from kvpushd.core.events import (
    Advanced,
    Announced,
    Cancelled,
    Declined,
    Described,
    EngineJoined,
    EngineLeft,
    Event,
    HandedOff,
    InletClosed,
    LinkLost,
    MoverDied,
    PeerEnded,
    PeerFenced,
    PeerLanded,
    PeerMatched,
    PeerMoving,
    PoolMapped,
    Reached,
    ReceiverGone,
    ReceiverLost,
    Reserved,
    Tick,
    Withdrawn,
    WriteEnded,
)
from kvpushd.core.instructions import (
    Account,
    CloseInlet,
    CloseOutlet,
    Instruction,
    LetGo,
    Post,
    Reach,
    SayAnnounce,
    SayPeer,
    SayReached,
    SayReceiverGone,
    SayWithdraw,
    TellHandoffEnded,
    TellMatched,
    TellRejected,
    TellReservationEnded,
    TellReservationReleased,
)
from kvpushd.core.layout import Blocks
from kvpushd.core.ledger import Ledger
from kvpushd.core.words import (
    LOCAL,
    SECOND,
    Incarnation,
    Instant,
    LinkId,
    ReceiverView,
    SenderAddress,
    WriteId,
)
from tests.core.pools import Model, Shape, listed, ranks

Value = tuple[bytes, str, int, int, str, int]
"""What a cell holds: transfer, sending part, attempt, position, layer, head."""
Address = tuple[int, str, int, int, int]
"""A cell: rank, layer, head, block, token."""
Session = int | None
"""A rank's worker, or the scheduler."""

LIMITS = Limits(lease=30 * SECOND, fence_patience=2 * SECOND, write_bytes=64, link_bytes=160)


def mapped_cells(layout: Layout, lists: tuple[Blocks, ...]) -> dict[int, tuple[int, int]]:
    """Block and token of every position that the lists hold."""
    (group,) = layout.groups
    return {
        listed.start + i * group.block_size + token: (int(block), token)
        for listed in lists
        for i, block in enumerate(listed.ids)
        for token in range(group.block_size)
    }


@dataclass(slots=True)
class Held:
    """A half as its engine knows it."""

    key: TransferKey
    incarnation: Incarnation
    start: int
    end: int
    blocks: list[int] = field(default_factory=list)
    told: int = 0
    released: int = 0
    matched: int = 0
    fault: Fault | None = None
    heard_at: Instant | None = None
    """When the ledger heard of it; of a handoff, of its seal."""
    sealed: bool = False
    named: int = 0
    """Blocks that were handed off."""
    items: int = 0
    """What was said of it that may be rejected."""
    rejections: int = 0

    @property
    def over(self) -> bool:
        return self.told > 0


class Engine:
    """One engine's ranks on one node: its memory, its blocks, its halves."""

    def __init__(self, name: str, node: Node, layouts: dict[int, Layout], world_size: int) -> None:
        self.name = name
        self.node = node
        self.layouts = layouts
        self.world_size = world_size
        self.group = next(iter(layouts.values())).groups[0]
        self.blocks = next(iter(layouts.values())).blocks
        self.free = deque(range(self.blocks))
        self.owner: dict[int, Held] = {}
        self.memory: dict[Address, Value] = {}
        self.incarnation: Incarnation | None = None
        self.leaving: set[Incarnation] = set()
        self.reservations: dict[TransferKey, Held] = {}
        self.handoffs: dict[TransferKey, Held] = {}
        self.used: set[tuple[Incarnation, TransferKey, Side]] = set()
        """A key is used once."""
        self.ended_at: dict[tuple[Incarnation, TransferKey], Instant] = {}
        self.said: dict[Session, deque[Event]] = {}
        self.faults: list[Fault | None] = []
        """How its halves ended, in order."""

    @property
    def uid(self) -> str:
        return f"{self.name}@{self.node.name}"

    @property
    def size(self) -> int:
        return self.group.block_size

    def say(self, event: Event, session: Session = None) -> None:
        self.said.setdefault(session, deque()).append(event)

    def allocate(self, held: Held, count: int) -> bool:
        if len(self.free) < count:
            return False
        for _ in range(count):
            block = self.free.popleft()
            held.blocks.append(block)
            self.owner[block] = held
        return True

    def give_back(self, held: Held) -> None:
        for block in held.blocks:
            del self.owner[block]
            # At once to the next request.
            self.free.appendleft(block)

    def listed(self, held: Held, first: int = 0, last: int | None = None) -> tuple[Blocks, ...]:
        start = held.start // self.size * self.size
        return (listed(start + first * self.size, *held.blocks[first:last]),)

    def cells(
        self, held: Held, rank: int, positions: range, layers: range
    ) -> Iterator[tuple[Address, Value]]:
        layout = self.layouts[rank]
        where = mapped_cells(layout, self.listed(held))
        tid, attempt = held.key.transfer_id, held.key.attempt
        for layer in layout.layers[layers.start : layers.stop]:
            for head in range(layer.first_head, layer.first_head + layer.heads):
                for position in positions:
                    block, token = where[position]
                    value = (tid, self.uid, attempt, position, layer.name, head)
                    yield (rank, layer.name, head, block, token), value


@dataclass(slots=True, eq=False)
class Inlet:
    open: bool = True


@dataclass(slots=True, eq=False)
class Wire:
    """One connection of a receiving node to a sending one."""

    receiver: Node
    sender: Node
    number: int
    to_sender: deque[tuple[Event, Inlet | None]] = field(default_factory=deque)
    to_receiver: deque[Event] = field(default_factory=deque)
    broken: bool = False
    receiver_knows: bool = False
    sender_knows: bool = False

    @property
    def out_name(self) -> LinkId:
        return LinkId(self.sender.name)

    @property
    def in_name(self) -> LinkId:
        return LinkId(f"{self.receiver.name}#{self.number}")


@dataclass(slots=True, eq=False)
class Write:
    """A posted write: what it has to copy, and what of that has landed."""

    node: Node
    post: Post
    cells: list[tuple[Address, Address]]
    inlet: Inlet | None
    source: Engine
    target: Engine
    landed: int = 0

    @property
    def local(self) -> bool:
        return self.post.link == LOCAL

    @property
    def can_land(self) -> bool:
        return self.inlet is None or self.inlet.open

    def reads(self, held: Held) -> bool:
        return any(self.source.owner.get(address[3]) is held for address, _ in self.cells)


@dataclass(slots=True, eq=False)
class Stray:
    """Bytes that were under way when their write failed."""

    target: Engine
    incarnation: Incarnation
    inlet: Inlet
    cells: deque[tuple[Address, Value]]


class Node:
    """One daemon: a ledger, and what carries out its instructions."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.ledger = Ledger(limits)
        self.engines: dict[Incarnation, Engine] = {}
        """Those whose pools are not unmapped yet."""
        self.inlets: dict[tuple[LinkId, Incarnation], Inlet] = {}
        self.reaches: list[Reach] = []
        self.closes: deque[CloseInlet] = deque()
        self.late: deque[Event] = deque()
        self.writes: dict[WriteId, Write] = {}
        self.outlets: dict[tuple[LinkId, Incarnation], Inlet] = {}
        self.unmapped: deque[tuple[Incarnation, int]] = deque()
        self.fed: deque[tuple[Instant, Event]] = deque(maxlen=40)
        self.accounts: list[Account] = []


class World:
    """All nodes, and everything that is under way between them."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.now: Instant = SECOND
        self.nodes: dict[str, Node] = {}
        self.engines: list[Engine] = []
        self.wires: list[Wire] = []
        self.strays: list[Stray] = []
        self.let_go: list[Incarnation] = []
        self._numbers = iter(range(1, 1 << 30))
        self.landed_transfers = 0

    # --- building ----------------------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        if name not in self.nodes:
            self.nodes[name] = Node(name, self.limits)
        return self.nodes[name]

    def engine(
        self,
        name: str,
        *nodes: str,
        model: Model | None = None,
        tp: int = 1,
        block_size: int = 4,
        blocks: int = 12,
        join: bool = True,
    ) -> list[Engine]:
        """An engine, its ranks spread evenly over the nodes; its parts."""
        model = model or Model((0, 0), heads=2, planes=(1,))
        layouts = ranks(model, Shape((Group(block_size),), blocks=blocks), tp)
        each = tp // len(nodes)
        parts = []
        for i, where in enumerate(nodes):
            mine = {rank: layouts[rank] for rank in range(i * each, (i + 1) * each)}
            part = Engine(name, self.node(where), mine, tp)
            self.engines.append(part)
            parts.append(part)
            if join:
                self.join(part)
        return parts

    def join(self, engine: Engine, *, mapped: bool = True) -> None:
        """A new incarnation. Not before all that the last one left is fenced: a Welcome says so."""
        assert engine.incarnation is None
        assert not engine.leaving
        incarnation = Incarnation(next(self._numbers).to_bytes(16, "big"))
        engine.incarnation = incarnation
        engine.node.engines[incarnation] = engine
        fingerprint = {"model": "clockwork"}
        ranks_here = len(engine.layouts)
        self.feed(
            engine.node, EngineJoined(incarnation, engine.name, fingerprint, engine.world_size, ranks_here)
        )
        for rank in engine.layouts:
            if mapped:
                self.feed(engine.node, PoolMapped(incarnation, rank, engine.layouts[rank]))
            else:
                engine.node.unmapped.append((incarnation, rank))

    def leave(self, engine: Engine) -> None:
        """Its session ends. What it holds it uses again once its pools are unmapped."""
        incarnation = engine.incarnation
        assert incarnation is not None
        engine.incarnation = None
        engine.leaving.add(incarnation)
        engine.said.clear()
        self.feed(engine.node, EngineLeft(incarnation, "left"))

    # --- events and instructions -------------------------------------------------------------------------

    def feed(self, node: Node, event: Event) -> None:
        node.fed.append((self.now, event))
        self.repeat(node, event)

    def repeat(self, node: Node, event: Event) -> None:
        """Feeds what was fed before. It is as old as it was."""
        for instruction in node.ledger.handle(event, self.now):
            self._carry(node, instruction)

    def _carry(self, node: Node, do: Instruction) -> None:
        match do:
            case Reach():
                node.reaches.append(do)
            case CloseInlet():
                self._cancel_reaches(node, do.link, do.incarnation)
                assert do not in node.closes, "an inlet is closed once"
                node.closes.append(do)
            case CloseOutlet():
                node.outlets.pop((do.link, do.incarnation), None)
            case SayAnnounce(announced=said):
                self._to_sender(node, said.link, said)
            case SayWithdraw(withdrawn=withdrawn):
                if withdrawn.incarnation is None and self.wire_of(node, withdrawn.link) is None:
                    self.dial(node, withdrawn.link)
                self._to_sender(node, withdrawn.link, withdrawn)
            case SayReceiverGone(gone=gone):
                self._to_sender(node, gone.link, gone)
            case SayReached(reached=reached):
                self._to_receiver(node, reached)
            case SayPeer(item=item):
                self._to_receiver(node, item)
            case Post():
                self._post(node, do)
            case LetGo():
                self._let_go(node, do.incarnation)
            case Account():
                node.accounts.append(do)
            case _:
                self._tell(node, do)

    def wire_of(self, node: Node, link: LinkId) -> Wire | None:
        """The connection that the receiving node holds to be up."""
        found = [w for w in self.wires if w.receiver is node and w.out_name == link and not w.receiver_knows]
        return found[-1] if found else None

    def dial(self, node: Node, link: LinkId) -> Wire:
        wire = Wire(node, self.nodes[link], next(self._numbers))
        self.wires.append(wire)
        return wire

    def _to_sender(
        self,
        node: Node,
        link: LinkId,
        item: Announced | Withdrawn | ReceiverGone | Described,
        inlet: Inlet | None = None,
    ) -> None:
        wire = self.wire_of(node, link)
        if wire is not None and not wire.broken:
            wire.to_sender.append((replace(item, link=wire.in_name), inlet))

    def _to_receiver(
        self, node: Node, item: Reached | PeerMatched | PeerMoving | PeerLanded | PeerEnded | PeerFenced
    ) -> None:
        for wire in self.wires:
            if wire.sender is node and wire.in_name == item.link and not wire.broken:
                wire.to_receiver.append(replace(item, link=wire.out_name))

    # --- links -------------------------------------------------------------------------------------------

    def deliver(self, wire: Wire, *, to_sender: bool) -> None:
        """The next item arrives."""
        if not to_sender:
            self.feed(wire.receiver, wire.to_receiver.popleft())
            return
        item, inlet = wire.to_sender.popleft()
        if isinstance(item, Described):
            assert inlet is not None
            wire.sender.outlets[item.link, item.receiver.incarnation] = inlet
        self.feed(wire.sender, item)

    def cut(self, wire: Wire, lost: int = 0) -> None:
        """The connection breaks; the last items each way are lost."""
        wire.broken = True
        for queue in (wire.to_sender, wire.to_receiver):
            for _ in range(min(lost, len(queue))):
                queue.pop()

    def notice(self, wire: Wire, *, sender: bool) -> None:
        """One side finds that the connection is broken."""
        if sender:
            wire.sender_knows = True
            wire.to_sender.clear()
            self.feed(wire.sender, ReceiverLost(wire.in_name, "broken"))
        else:
            wire.receiver_knows = True
            wire.to_receiver.clear()
            self.feed(wire.receiver, LinkLost(wire.out_name, "broken"))
        if wire.sender_knows and wire.receiver_knows:
            self.wires.remove(wire)

    def reach(self, node: Node, reach: Reach, *, fails: bool = False) -> None:
        """Opens link and inlet, and presents the engine to its sender; the answer comes over the link."""
        node.reaches.remove(reach)
        engine = node.engines.get(reach.incarnation)
        known = node.ledger.engines.get(reach.incarnation)
        if fails or engine is None or known is None or not known.ready:
            fault = Fault(Reason.PEER_UNREACHABLE, "no way")
            self.feed(node, Reached(reach.link, reach.incarnation, reach.sender_engine_id, fault))
            return
        if self.wire_of(node, reach.link) is None:
            self.dial(node, reach.link)
        inlet = node.inlets.setdefault((reach.link, reach.incarnation), Inlet())
        view = ReceiverView(
            engine.name, reach.incarnation, {"model": "clockwork"}, engine.world_size, engine.layouts
        )
        described = Described(reach.link, view, reach.sender_engine_id)
        self._to_sender(node, reach.link, described, inlet)

    def _cancel_reaches(self, node: Node, link: LinkId, incarnation: Incarnation) -> None:
        for reach in list(node.reaches):
            if (reach.link, reach.incarnation) == (link, incarnation):
                node.reaches.remove(reach)
                fault = Fault(Reason.ENGINE_GONE, "its inlet is closed")
                node.late.append(Reached(link, incarnation, reach.sender_engine_id, fault))

    def close_inlet(self, node: Node) -> None:
        """The oldest inlet that is to be closed is closed."""
        do = node.closes.popleft()
        inlet = node.inlets.pop((do.link, do.incarnation), None)
        if inlet is not None:
            inlet.open = False
        self.feed(node, InletClosed(do.link, do.incarnation))

    # --- movers ------------------------------------------------------------------------------------------

    def _post(self, node: Node, post: Post) -> None:
        source = node.engines[post.sender]
        inlet = None if post.link == LOCAL else node.outlets.get((post.link, post.receiver))
        target = self._engine_of(post.receiver)
        known = node.ledger.engines.get(post.sender)
        assert known is not None
        assert known.ready, "nothing is posted from pools that are not mapped"
        if target is None or (post.link != LOCAL and inlet is None):
            node.late.append(WriteEnded(post.write, Fault(Reason.ENGINE_GONE, "no outlet")))
            return
        here, there = source.layouts[post.source_rank], target.layouts[post.target_rank]
        at, to = mapped_cells(here, post.source_blocks), mapped_cells(there, post.target_blocks)
        theirs = {layer.name: layer for layer in there.layers}
        cells = []
        for mine in here.layers[post.window.first_layer : post.window.end_layer]:
            other = theirs[mine.name]
            low = max(mine.first_head, other.first_head)
            high = min(mine.first_head + mine.heads, other.first_head + other.heads)
            for head in range(low, high):
                for position in range(post.window.start, post.window.end):
                    assert position in at, "every position of a window has a block"
                    assert position in to
                    cells.append(
                        (
                            (post.source_rank, mine.name, head, *at[position]),
                            (post.target_rank, mine.name, head, *to[position]),
                        )
                    )
        assert cells
        assert post.bytes == len(cells), "a cell is a byte"
        write = Write(node, post, cells, inlet, source, target)
        mine_now = {address for _, address in cells}
        for other_write in self.writes():
            if other_write.post.receiver == post.receiver and other_write.can_land:
                taken = mine_now & {address for _, address in other_write.cells}
                assert not taken, "no two writes to one position are under way (invariant 8)"
        for address, _ in cells:
            self._read(write, address)
        node.writes[post.write] = write

    def _engine_of(self, incarnation: Incarnation) -> Engine | None:
        for node in self.nodes.values():
            if incarnation in node.engines:
                return node.engines[incarnation]
        return None

    def writes(self) -> list[Write]:
        return [write for node in self.nodes.values() for write in node.writes.values()]

    def _read(self, write: Write, address: Address) -> Value:
        """A read of the sender's pool: of a block that its engine still holds for this very transfer."""
        engine, incarnation = write.source, write.post.sender
        assert incarnation in engine.node.engines, "no read from a pool that is unmapped (invariant 2)"
        value = engine.memory.get(address)
        assert value is not None, "only what is final is read"
        if engine.incarnation == incarnation:
            held = engine.owner.get(address[3])
            assert held is not None, "no read after release (invariant 2)"
            assert (held.key.transfer_id, held.key.attempt) == (value[0], value[2]), (
                "only what is final is read"
            )
            assert not held.over, "no read after release (invariant 2)"
        return value

    def _put(self, engine: Engine, incarnation: Incarnation, address: Address, value: Value) -> None:
        """A write into the receiver's pool: into a block that is reserved for this very transfer."""
        assert incarnation in engine.node.engines, "no write into a pool that is unmapped (invariant 1)"
        if engine.incarnation == incarnation:
            held = engine.owner.get(address[3])
            assert held is not None, "no write after fence (invariant 1)"
            assert held.key.transfer_id == value[0], "no write after fence (invariant 1)"
            assert held.key in engine.reservations
            assert not held.released
            assert not (held.over and held.fault is None), "nothing lands after all has landed (invariant 1)"
        engine.memory[address] = value

    def land(self, write: Write, count: int) -> None:
        """Some of a write's bytes arrive, as far as there is something that takes them."""
        if not write.can_land:
            return
        for source, target in write.cells[write.landed : write.landed + count]:
            self._put(write.target, write.post.receiver, target, self._read(write, source))
            write.landed += 1

    def complete(self, write: Write) -> None:
        """All of a write lands, and the mover says so; else it says that it failed."""
        self.land(write, len(write.cells))
        if write.landed < len(write.cells):
            self.fail(write)
            return
        del write.node.writes[write.post.write]
        n = len(write.cells)
        self.feed(write.node, WriteEnded(write.post.write, None, n, 1, self.now, self.now))

    def fail(self, write: Write, reason: Reason = Reason.TRANSPORT_FAILED) -> None:
        """The mover says that a write failed; over a link its bytes may still be under way."""
        self._end_reading(write)
        self.feed(write.node, WriteEnded(write.post.write, Fault(reason, "failed"), 0, 0, 0, self.now))

    def _end_reading(self, write: Write) -> None:
        del write.node.writes[write.post.write]
        if write.inlet is not None and write.inlet.open:
            rest = deque((to, self._read(write, at)) for at, to in write.cells[write.landed :])
            self.strays.append(Stray(write.target, write.post.receiver, write.inlet, rest))

    def land_stray(self, stray: Stray, count: int) -> None:
        """Bytes of a failed write arrive after all."""
        if not stray.inlet.open:
            stray.cells.clear()
        for _ in range(min(count, len(stray.cells))):
            self._put(stray.target, stray.incarnation, *stray.cells.popleft())
        if not stray.cells:
            self.strays.remove(stray)

    def kill_mover(self, node: Node, *, writes_first: bool) -> None:
        """It is replaced at once, but has no pools, inlets or outlets yet."""
        dead = list(node.writes.values())
        for write in dead:
            self._end_reading(write)
        ends = [WriteEnded(w.post.write, Fault(Reason.MOVER_DIED, "died"), 0, 0, 0, self.now) for w in dead]
        for inlet in node.inlets.values():
            inlet.open = False
        node.inlets.clear()
        node.outlets.clear()
        for reach in list(node.reaches):
            self._cancel_reaches(node, reach.link, reach.incarnation)
        for engine in set(node.engines.values()):
            if engine.incarnation is not None:
                node.unmapped.extend((engine.incarnation, rank) for rank in engine.layouts)
        died = MoverDied(frozenset(node.engines))
        events: list[Event] = [*ends, died] if writes_first else [died, *ends]
        for event in events:
            self.feed(node, event)
        for wire in list(self.wires):
            if wire.sender is node and not wire.sender_knows:
                self.cut(wire)
                self.notice(wire, sender=True)

    def remap(self, node: Node) -> None:
        """One more pool is mapped by the new mover."""
        incarnation, rank = node.unmapped.popleft()
        engine = node.engines.get(incarnation)
        if engine is not None and engine.incarnation == incarnation:
            self.feed(node, PoolMapped(incarnation, rank, engine.layouts[rank]))

    # --- what engines hear -------------------------------------------------------------------------------

    def _let_go(self, node: Node, incarnation: Incarnation) -> None:
        assert incarnation not in self.let_go, "an engine is let go once"
        self.let_go.append(incarnation)
        engine = node.engines.pop(incarnation)
        assert incarnation in engine.leaving, "only what has left is let go"
        engine.leaving.remove(incarnation)
        for write in self.writes():
            assert write.post.sender != incarnation, "what is let go is not read"
            assert not (write.local and write.post.receiver == incarnation), "nor written"
        assert not any(inlet.open for key, inlet in node.inlets.items() if key[1] == incarnation)
        # A Welcome is proof that all is fenced.
        for held in (*engine.reservations.values(), *engine.handoffs.values()):
            if held.incarnation == incarnation:
                engine.give_back(held)
        engine.reservations = {k: h for k, h in engine.reservations.items() if h.incarnation != incarnation}
        engine.handoffs = {k: h for k, h in engine.handoffs.items() if h.incarnation != incarnation}

    def _tell(self, node: Node, told: Instruction) -> None:
        assert not isinstance(told, Account | LetGo | Post | Reach | CloseInlet | CloseOutlet)
        assert isinstance(
            told,
            TellMatched | TellReservationEnded | TellReservationReleased | TellHandoffEnded | TellRejected,
        )
        engine = node.engines[told.incarnation]
        assert engine.incarnation == told.incarnation, "an engine that left hears nothing more (invariant 6)"
        match told:
            case TellMatched():
                halves = engine.reservations if told.side is Side.RECEIVER else engine.handoffs
                held = halves[told.key]
                assert not held.matched, "said once"
                assert not held.over
                held.matched += 1
            case TellReservationEnded():
                held = engine.reservations[told.key]
                assert not held.over, "one end (invariant 3)"
                held.told += 1
                held.fault = told.fault
                engine.faults.append(told.fault)
                if told.fault is None:
                    assert told.released
                    self._check_landed(engine, held)
                    self.landed_transfers += 1
                if told.released:
                    self._release(engine, held)
            case TellReservationReleased():
                held = engine.reservations[told.key]
                assert held.over, "an end comes before its release (invariant 3)"
                self._release(engine, held)
            case TellHandoffEnded():
                held = engine.handoffs[told.key]
                assert not held.over, "one end (invariant 3)"
                held.told += 1
                held.fault = told.fault
                engine.faults.append(told.fault)
                for write in self.writes():
                    blocks = {at[3] for at, _ in write.cells}
                    mine = write.post.sender == told.incarnation and blocks & set(held.blocks)
                    assert not mine, "no end while a write of it is not terminal (invariant 2)"
                del engine.handoffs[told.key]
                engine.ended_at[told.incarnation, told.key] = self.now
                engine.give_back(held)
            case TellRejected():
                halves = engine.reservations if told.side is Side.RECEIVER else engine.handoffs
                rejected = halves.get(told.key)
                if rejected is not None:
                    rejected.rejections += 1
                    if rejected.rejections == rejected.items:
                        # Nothing changed by any item: the ledger has no such half.
                        rejected.fault = told.fault
                        engine.faults.append(told.fault)
                        del halves[told.key]
                        engine.give_back(rejected)

    def _release(self, engine: Engine, held: Held) -> None:
        assert not held.released, "one release (invariant 3)"
        held.released += 1
        for write in self.writes():
            if write.local and write.post.receiver == held.incarnation:
                blocks = {to[3] for _, to in write.cells[write.landed :]}
                assert not blocks & set(held.blocks), "no write after fence (invariant 1)"
        del engine.reservations[held.key]
        engine.give_back(held)

    def _check_landed(self, engine: Engine, held: Held) -> None:
        """All positions, in all layers of all ranks, of one attempt of each sending part (invariant 5)."""
        attempts: dict[str, set[int]] = {}
        for rank, layout in engine.layouts.items():
            layers = range(len(layout.layers))
            for address, wanted in engine.cells(held, rank, range(held.start, held.end), layers):
                value = engine.memory.get(address)
                assert value is not None, f"{address} was never written (invariant 5)"
                assert (value[0], *value[3:]) == (wanted[0], *wanted[3:]), f"{address} (invariant 5)"
                attempts.setdefault(value[1], set()).add(value[2])
        assert all(len(numbers) == 1 for numbers in attempts.values()), "one attempt (invariant 8)"

    # --- what engines do ---------------------------------------------------------------------------------

    def reserve(
        self,
        engine: Engine,
        key: TransferKey,
        senders: list[Engine],
        start: int,
        end: int,
        prompt: bytes = b"",
    ) -> Held | None:
        """Blocks for positions [start, end), if there is room."""
        assert engine.incarnation is not None
        held = Held(key, engine.incarnation, start, end)
        first, use = start // engine.size, (engine.incarnation, key, Side.RECEIVER)
        if use in engine.used or not engine.allocate(held, -(-end // engine.size) - first):
            return None
        engine.used.add(use)
        engine.reservations[key] = held
        held.items = 1
        engine.say(
            Reserved(
                engine.incarnation,
                key,
                self.addresses(engine, senders),
                start,
                end,
                engine.listed(held),
                prompt=prompt,
            )
        )
        return held

    def addresses(self, engine: Engine, senders: list[Engine]) -> tuple[SenderAddress, ...]:
        return tuple(
            SenderAddress(s.name, LOCAL if s.node is engine.node else LinkId(s.node.name)) for s in senders
        )

    def hand_off(
        self,
        engine: Engine,
        key: TransferKey,
        prompt: int,
        receiver: str = "",
        prompts: Mapping[int, bytes] | None = None,
    ) -> Held | None:
        """Opens a handoff for positions [0, prompt), without blocks yet."""
        assert engine.incarnation is not None
        use = (engine.incarnation, key, Side.SENDER)
        if use in engine.used:
            return None
        engine.used.add(use)
        held = engine.handoffs[key] = Held(key, engine.incarnation, 0, prompt, items=1)
        engine.say(
            HandedOff(engine.incarnation, key, receiver_engine_id=receiver, prompts=dict(prompts or {}))
        )
        return held

    def append(self, engine: Engine, held: Held, blocks: int, *, seal: bool) -> None:
        """Names blocks; with the last ones, or as asked, the seal."""
        missing = -(-held.end // engine.size) - len(held.blocks)
        if missing and not engine.allocate(held, min(blocks, missing)):
            return
        held.items += 1
        held.sealed |= seal and len(held.blocks) * engine.size >= held.end
        engine.say(
            HandedOff(
                held.incarnation,
                held.key,
                engine.listed(held, held.named),
                seal=held.end if held.sealed else None,
            )
        )
        held.named = len(held.blocks)

    def compute(self, engine: Engine, held: Held, rank: int, positions: int, layers: range) -> None:
        """A worker's forward pass fills positions in some layers, and says so."""
        positions = min(positions, held.end, len(held.blocks) * engine.size)
        for address, value in engine.cells(held, rank, range(held.start, positions), layers):
            engine.memory[address] = value
        said = Advanced(held.incarnation, rank, held.key, positions, self.now, layers.start, layers.stop)
        engine.say(said, rank)

    def cancel(self, engine: Engine, key: TransferKey, side: Side) -> None:
        assert engine.incarnation is not None
        engine.say(Cancelled(engine.incarnation, key, side, "not needed"))

    def decline(self, engine: Engine, key: TransferKey, senders: list[Engine]) -> None:
        assert engine.incarnation is not None
        engine.say(Declined(engine.incarnation, key, self.addresses(engine, senders)))

    def speak(self, engine: Engine, session: Session) -> None:
        """The next thing that a process of the engine said reaches the daemon."""
        event = engine.said[session].popleft()
        if not engine.said[session]:
            del engine.said[session]
        if isinstance(event, HandedOff | Advanced) and self._is_too_late(engine, event):
            return
        match event:
            case Reserved():
                held = engine.reservations.get(event.key)
                if held is not None:
                    held.heard_at = self.now
            case HandedOff(seal=int()):
                held = engine.handoffs.get(event.key)
                if held is not None and held.heard_at is None:
                    held.heard_at = self.now
            case _:
                pass
        self.feed(engine.node, event)

    def _is_too_late(self, engine: Engine, event: HandedOff | Advanced) -> bool:
        """No session is silent for as long as the ledger remembers what has ended."""
        ended = engine.ended_at.get((event.incarnation, event.key))
        return ended is not None and ended + self.limits.lease <= self.now

    # --- time --------------------------------------------------------------------------------------------

    def turn(self, by: Instant) -> None:
        """Time passes."""
        self.now += by
        for node in self.nodes.values():
            self.feed(node, Tick())
        self._check_in_time()

    def _check_in_time(self) -> None:
        """Whatever nobody came for has ended with its lease (invariant 4)."""
        reading = {write.post.sender for write in self.writes()}
        for engine in self.engines:
            for held in engine.reservations.values():
                late = held.heard_at is not None and held.heard_at + self.limits.lease <= self.now
                live = held.incarnation == engine.incarnation
                assert not (late and live and not held.matched and not held.over), "in time (invariant 4)"
            for held in engine.handoffs.values():
                late = held.heard_at is not None and held.heard_at + self.limits.lease <= self.now
                live = held.incarnation == engine.incarnation and engine.incarnation not in reading
                assert not (late and live and not held.matched), "in time (invariant 4)"

    def hear_late(self, node: Node) -> None:
        """What a daemon's own tasks had to say comes in."""
        self.feed(node, node.late.popleft())

    # --- carrying on -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Carries on one thing that is under way, well; False where there is none."""
        for engine in self.engines:
            for session in engine.said:
                self.speak(engine, session)
                return True
        for node in self.nodes.values():
            if node.late:
                self.hear_late(node)
                return True
            if node.reaches:
                self.reach(node, node.reaches[0])
                return True
            if node.closes:
                self.close_inlet(node)
                return True
            if node.unmapped:
                self.remap(node)
                return True
        for wire in self.wires:
            if wire.broken and not wire.receiver_knows:
                self.notice(wire, sender=False)
                return True
            if wire.broken and not wire.sender_knows:
                self.notice(wire, sender=True)
                return True
            if wire.to_sender or wire.to_receiver:
                self.deliver(wire, to_sender=bool(wire.to_sender))
                return True
        return False

    def settle(self) -> None:
        """Carries on everything but the writes."""
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("it never comes to rest")

    def run(self) -> None:
        """Carries on everything, the writes too."""
        self.settle()
        while writes := self.writes():
            self.complete(writes[0])
            self.settle()

    def end(self) -> None:
        """Everything heals, all time passes; then all engines leave. Nothing must be left of anything."""
        self.run()
        for engine in self.engines:
            for key, held in engine.handoffs.items():
                if held.incarnation != engine.incarnation:
                    continue
                # Whoever computes knows when that ends: an open handoff is its engine's.
                if not held.sealed:
                    self.cancel(engine, key, Side.SENDER)
                for rank, layout in engine.layouts.items() if held.sealed else ():
                    self.compute(engine, held, rank, held.end, range(len(layout.layers)))
        self.run()
        for _ in range(3):
            self.turn(self.limits.lease + self.limits.fence_patience)
            self.run()
        for node in self.nodes.values():
            live = [e for e in self.engines if e.node is node]
            assert not node.ledger.reservations(), "every request ends (invariant 4)"
            assert not node.ledger.handoffs(), "every request ends (invariant 4)"
            assert node.ledger.idle
            assert not any(e.reservations or e.handoffs for e in live), "and every engine knows (invariant 3)"
        for engine in self.engines:
            if engine.incarnation is not None:
                self.leave(engine)
        self.run()
        self.turn(self.limits.lease * 2)
        self.run()
        for node in self.nodes.values():
            assert not node.engines, "every engine that left is let go"
            assert not node.writes
            assert not node.inlets, "with its inlets"
            assert not leftovers(node.ledger), "nothing is kept"
        for stray in list(self.strays):
            self.land_stray(stray, len(stray.cells))
        for engine in self.engines:
            assert len(engine.free) == engine.blocks, "no block is lost"


def leftovers(ledger: Ledger) -> list[str]:
    """Every container inside a ledger that holds something."""
    found: list[str] = []
    seen: set[int] = set()

    def look(path: str, thing: object) -> None:
        if id(thing) in seen or isinstance(thing, Limits | str | bytes | int | float | None):
            return
        seen.add(id(thing))
        if path.endswith("._lines"):
            assert isinstance(thing, dict)
            for link, line in thing.items():
                look(f"{path}[{link}]", line)
            return
        if isinstance(thing, dict | list | set | deque):
            # A heap may hold what was dropped; it is told by its dictionary. What was learned of a link, and
            # its line, live as long as the link.
            if len(thing) and not path.endswith(("._heap", "._paces")):
                live = [v for v in thing.values() if v != 0] if isinstance(thing, dict) else list(thing)
                if live:
                    found.append(f"{path}: {thing!r:.200}")
            return
        for name in [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]:
            look(f"{path}.{name}", getattr(thing, name, None))

    look("ledger", ledger)
    return found
