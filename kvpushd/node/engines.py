# SPDX-License-Identifier: Apache-2.0
"""The engines of the node: their sessions, their incarnations, and their pools."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from kvpush_client.event_wire import DaemonEvent, PoolReady
from kvpush_client.events import (
    Draining,
    HandoffEnded,
    Matched,
    Rejected,
    ReservationEnded,
    ReservationReleased,
    TransferKey,
)
from kvpush_client.items import (
    DescribePool,
    FirstToken,
    Identity,
    Item,
    Role,
    Sender,
    Welcome,
)
from kvpush_client.layout import Layout
from kvpushd.core import layout as layouts
from kvpushd.core.events import EngineJoined, EngineLeft, PoolMapped
from kvpushd.core.instructions import (
    LetGo,
    TellHandoffEnded,
    TellMatched,
    TellRejected,
    TellReservationEnded,
    TellReservationReleased,
)
from kvpushd.core.words import LOCAL, Incarnation, LinkId, SenderAddress
from kvpushd.errors import BadMemory, Duplicate, Invalid, KvpushError, MoverDied, Unreachable
from kvpushd.memory import host
from kvpushd.metrics import Metrics
from kvpushd.node.hub import Hub
from kvpushd.node.items import event_of
from kvpushd.node.movers import Movers
from kvpushd.node.tasks import Tasks
from kvpushd.rpc.engine import EngineSession

MEMORY = "memfd"
"""How pools are reached, for people."""


@dataclass(slots=True)
class PoolEntry:
    """One rank's pool: the daemon keeps its descriptor, so that a new mover can map it again."""

    pool_id: bytes
    rank: int
    fd: int
    nbytes: int
    layout: Layout | None = None
    mapping: bool = False
    """A mover maps it, or has."""


@dataclass(slots=True)
class EngineEntry:
    """One incarnation of one engine, from its first session until its last pool is unmapped."""

    incarnation: Incarnation
    identity: Identity
    since_unix_ns: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: set[EngineSession] = field(default_factory=set)
    pools: dict[int, PoolEntry] = field(default_factory=dict)
    live: bool = True

    @property
    def engine_id(self) -> str:
        """Its name."""
        return self.identity.engine_id

    @property
    def pool_bytes(self) -> int:
        """Bytes of all its pools."""
        return sum(pool.nbytes for pool in self.pools.values())


class EngineRoom:
    """Decides for EngineService and FdService what the ledger does not: who is who, and which memory."""

    def __init__(
        self,
        hub: Hub,
        movers: Movers,
        *,
        lease: float,
        peer_address: Callable[[], tuple[str, int]],
        software: str,
        first_token: Callable[[Incarnation, TransferKey, int], None],
        metrics: Metrics,
    ) -> None:
        """`peer_address` is where other nodes reach this one; `lease` in seconds."""
        self._hub = hub
        self._movers = movers
        self._lease = lease
        self._peer_address = peer_address
        self._software = software
        self._first_token = first_token
        self._metrics = metrics
        self._entries: dict[Incarnation, EngineEntry] = {}
        self._of_session: dict[EngineSession, EngineEntry] = {}
        self._tasks = Tasks("engines")
        self._log = structlog.get_logger("kvpushd.engines")
        self._draining = False
        hub.on(LetGo, self._let_go)
        hub.on(TellMatched, lambda i: self._tell(i.incarnation, Matched(i.key, i.side)))
        hub.on(
            TellReservationEnded,
            lambda i: self._tell(
                i.incarnation, ReservationEnded(i.key, i.fault, i.released, i.counts), workers=True
            ),
        )
        hub.on(TellReservationReleased, lambda i: self._tell(i.incarnation, ReservationReleased(i.key)))
        hub.on(TellHandoffEnded, lambda i: self._tell(i.incarnation, HandoffEnded(i.key, i.fault, i.counts)))
        hub.on(TellRejected, self._tell_rejected)

    def __iter__(self) -> Iterator[EngineEntry]:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.engine_id))

    # --- sessions (EngineDesk) ---------------------------------------------------------------------------

    async def join(self, identity: Identity, session: EngineSession) -> Welcome:
        """Takes a session in; waits until what the same launch left before is fenced and unmapped.

        Raises Duplicate where another launch, or another process in the same place, holds the name.
        """
        while (entry := self._current(identity)) is not None:
            if entry.live and not self._takes_its_own_place(entry, identity):
                break
            await entry.gone.wait()
        if entry is None:
            entry = self._new(identity)
        else:
            _check_same_engine(entry, identity)
        entry.sessions.add(session)
        self._of_session[session] = entry
        if self._draining:
            session.tell(Draining())
        host, port = self._peer_address()
        return Welcome(entry.incarnation, self._lease, host, port, self._software)

    def _takes_its_own_place(self, entry: EngineEntry, identity: Identity) -> bool:
        """Ends the former session of a process that comes again, whose loss was not noticed here yet."""
        for old in entry.sessions:
            if identity.process and old.identity.process == identity.process:
                old.end(Unreachable("the same process came again"))
                self._depart(entry, old)
                return True
        return False

    def _current(self, identity: Identity) -> EngineEntry | None:
        for entry in self._entries.values():
            if entry.engine_id != identity.engine_id:
                continue
            if entry.live and entry.identity.launch != identity.launch:
                # Without its launch: whoever knows that can join it.
                raise Duplicate(
                    f"engine_id {identity.engine_id!r} is taken by another engine "
                    f"({entry.identity.software or 'unnamed'}): give each engine an engine_id of its own "
                    "in its kv_transfer_config"
                )
            if entry.live or entry.identity.launch == identity.launch:
                return entry
        return None

    def _new(self, identity: Identity) -> EngineEntry:
        entry = EngineEntry(Incarnation(secrets.token_bytes(16)), identity, time.time_ns())
        self._entries[entry.incarnation] = entry
        joined = EngineJoined(
            entry.incarnation,
            identity.engine_id,
            identity.fingerprint,
            identity.world_size,
            identity.local_ranks,
        )
        self._metrics.engine_registered(identity.engine_id)
        self._hub.feed(joined)
        return entry

    def left(self, session: EngineSession) -> None:
        """A process is gone, and with it the incarnation: the others have to join anew."""
        entry = self._of_session.pop(session)
        entry.sessions.discard(session)
        self._depart(entry, session)

    def _depart(self, entry: EngineEntry, session: EngineSession) -> None:
        if not entry.live:
            return
        entry.live = False
        who = f"{session.identity.role.value} {session.identity.rank}"
        for other in list(entry.sessions):
            other.end(Unreachable(f"the session of {who} of this engine ended: join again"))
        self._hub.feed(EngineLeft(entry.incarnation, f"the session of its {who} ended"))

    def _let_go(self, instruction: LetGo) -> None:
        entry = self._entries.get(instruction.incarnation)
        if entry is not None:  # else the room is closed, and the mover's end unmaps
            self._tasks.start(self._unmap(entry))

    async def _unmap(self, entry: EngineEntry) -> None:
        while entry.pools:
            rank, pool = next(iter(entry.pools.items()))
            await self._movers.unmap_pool(pool.pool_id)
            del entry.pools[rank]
            os.close(pool.fd)
        del self._entries[entry.incarnation]
        entry.gone.set()
        # Another launch may have the name by now, and the metrics with it.
        if all(other.engine_id != entry.engine_id for other in self._entries.values()):
            self._metrics.engine_gone(entry.engine_id)
        self._log.info("engine let go", engine=entry.engine_id)

    def drain(self) -> None:
        """Says to all sessions, also those to come, that no new work is taken."""
        self._draining = True
        for entry in self._entries.values():
            for session in entry.sessions:
                session.tell(Draining())

    async def close(self) -> None:
        """Ends every session, and closes what is left."""
        for entry in list(self._entries.values()):
            for session in list(entry.sessions):
                session.end(Unreachable("the daemon stops"))
        await self._tasks.close()
        for entry in self._entries.values():
            for pool in entry.pools.values():
                os.close(pool.fd)
        self._entries.clear()

    # --- pools (PoolDesk) --------------------------------------------------------------------------------

    def offer(self, session: EngineSession, fd: int, nbytes: int, uid: int) -> bytes:
        """Takes a pool's descriptor over. Raises BadMemory where it can't be one."""
        entry = self._of_session.get(session)
        if entry is None or not entry.live:
            raise Unreachable("the session has ended")
        rank = session.identity.rank
        if rank in entry.pools:
            raise Duplicate(f"rank {rank} of engine {entry.engine_id} has offered a pool already")
        host.accept(fd, nbytes, uid)
        pool = PoolEntry(secrets.token_bytes(16), rank, fd, nbytes)
        entry.pools[rank] = pool
        return pool.pool_id

    def _describe(self, session: EngineSession, entry: EngineEntry, item: DescribePool) -> None:
        pool = entry.pools.get(session.identity.rank)
        if pool is None or pool.pool_id != item.pool_id:
            raise Invalid("the pool was not offered on fd.sock by this session")
        if pool.layout is not None:
            if pool.layout != item.layout:
                raise Duplicate("the pool was described before, otherwise")
            return
        layouts.check(item.layout)
        if item.layout.pool_bytes != pool.nbytes:
            raise BadMemory(
                f"the pool of rank {pool.rank} is {pool.nbytes:,} bytes but its layout says "
                f"{item.layout.pool_bytes:,}: the engine described another pool than it offered; restart it"
            )
        for other in entry.pools.values():
            if other.layout is not None and other.layout.blocks != item.layout.blocks:
                raise Invalid(
                    f"rank {pool.rank} has {item.layout.blocks} blocks, rank {other.rank} has "
                    f"{other.layout.blocks}: ranks of an engine share block ids, so they need equally many"
                )
        pool.layout = item.layout
        self._tasks.start(self._map(entry, pool, item.layout))

    async def _map(self, entry: EngineEntry, pool: PoolEntry, layout: Layout) -> None:
        """Maps a pool, unless that is under way or done, and tells whom it concerns."""
        if pool.mapping or not entry.live:
            return
        pool.mapping, mapped, refusal = True, False, None
        try:
            await self._movers.map_pool(pool.pool_id, pool.fd, layout)
            mapped = True
        except MoverDied:
            return  # the next mover maps it, if it has come in time for that: see `map_again`
        except KvpushError as error:
            refusal = error
        except Exception as error:  # noqa: BLE001, logged with its traceback
            # A bug, or no memory: an engine that is told nothing would wait for ever.
            self._log.exception("a pool can't be mapped", engine=entry.engine_id, rank=pool.rank)
            refusal = KvpushError(f"internal error: {error!r}")
        finally:
            pool.mapping = mapped
        if mapped and entry.live:
            self._hub.feed(PoolMapped(entry.incarnation, pool.rank, layout))
        for session in self._workers(entry, pool.rank):
            session.end(refusal) if refusal else session.tell(PoolReady(pool.pool_id))

    def _workers(self, entry: EngineEntry, rank: int) -> list[EngineSession]:
        """The sessions that offered a rank's pool."""
        return [s for s in entry.sessions if s.identity.role is Role.WORKER and s.identity.rank == rank]

    def forget_mappings(self) -> None:
        """The mover died, and all mappings with it."""
        for entry in self._entries.values():
            for pool in entry.pools.values():
                pool.mapping = False

    async def map_again(self) -> None:
        """Maps all pools into a mover that has taken a dead one's place."""
        for entry in list(self._entries.values()):
            for pool in list(entry.pools.values()):
                if pool.layout is not None:
                    await self._map(entry, pool, pool.layout)

    def pool_of(self, incarnation: Incarnation, rank: int) -> bytes | None:
        """The pool of a rank; None where the engine is gone."""
        entry = self._entries.get(incarnation)
        pool = entry.pools.get(rank) if entry else None
        return pool.pool_id if pool else None

    def get(self, incarnation: Incarnation) -> EngineEntry | None:
        """The engine of an incarnation."""
        return self._entries.get(incarnation)

    # --- items -------------------------------------------------------------------------------------------

    def item(self, session: EngineSession, item: Item) -> None:
        """What a process says, as the ledger's event. Raises KvpushError where it says nothing valid."""
        entry = self._of_session[session]
        if not entry.live:
            return  # another process of the engine is gone, and this one is being told
        match item:
            case DescribePool():
                self._describe(session, entry, item)
            case FirstToken():
                self._first_token(entry.incarnation, item.key, item.unix_ns)
            case _:
                self._hub.feed(event_of(item, entry.incarnation, session.identity.rank, self._address))

    def _address(self, sender: Sender) -> SenderAddress:
        """The link on which a sender is reached: this node itself, where it is one of its engines.

        A node has many names, so the port and the engine tell it: other nodes may have an engine of that id.
        """
        host, port = self._peer_address()
        if sender.port == port and (sender.host == host or self._is_here(sender.engine_id)):
            return SenderAddress(sender.engine_id, LOCAL)
        host = f"[{sender.host}]" if ":" in sender.host else sender.host
        return SenderAddress(sender.engine_id, LinkId(f"{host}:{sender.port}"))

    def _is_here(self, engine_id: str) -> bool:
        return any(entry.live and entry.engine_id == engine_id for entry in self._entries.values())

    def _tell_rejected(self, told: TellRejected) -> None:
        self._metrics.rejected("engine", told.fault.reason)
        self._tell(told.incarnation, Rejected(told.key, told.side, told.fault), workers=True)

    def _tell(self, incarnation: Incarnation, event: DaemonEvent, *, workers: bool = False) -> None:
        """Says it to the scheduler; to the workers only what they wait for, else half of all messages to
        engines would be for nobody."""
        entry = self._entries.get(incarnation)
        schedulers = []
        for session in entry.sessions if entry is not None else ():
            if session.identity.role is Role.SCHEDULER:
                schedulers.append(session)
            elif workers:
                session.tell(event)
        # Last: a request goes on by what its workers say.
        for session in schedulers:
            session.tell(event)


def _check_same_engine(entry: EngineEntry, identity: Identity) -> None:
    known = entry.identity
    for name in ("world_size", "local_ranks"):
        mine, theirs = getattr(known, name), getattr(identity, name)
        if mine != theirs:
            raise Invalid(f"processes of engine {entry.engine_id} disagree on {name}: {mine} and {theirs}")
    if dict(known.fingerprint) != dict(identity.fingerprint):
        raise Invalid(f"processes of engine {entry.engine_id} disagree on what its KV means")
    taken = [s.identity.rank for s in entry.sessions if s.identity.role is identity.role]
    if identity.rank in taken or (taken and identity.role is Role.SCHEDULER):
        what = identity.role.value if identity.role is Role.SCHEDULER else f"rank {identity.rank}"
        raise Duplicate(f"the {what} of engine {entry.engine_id} has a session already")
    if identity.role is Role.WORKER and len(taken) >= known.local_ranks:
        raise Invalid(
            f"engine {entry.engine_id} says that {known.local_ranks} of its ranks are on this node, and has "
            f"ranks {sorted(taken)} here: rank {identity.rank} is one too many"
        )
