# SPDX-License-Identifier: Apache-2.0
"""One process's life with the kvpushd of its node."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvpush_client import fdsock, hello_wire
from kvpush_client._proto import engine_pb2
from kvpush_client.door import obstacle
from kvpush_client.errors import DaemonRefused, DaemonUnreachable, KvpushClientError
from kvpush_client.event_wire import DaemonEvent, PoolReady, Refusal
from kvpush_client.events import Connected, Disconnected, Event, Fault, Reason, Rejected, Side, TransferKey
from kvpush_client.fences import Fences
from kvpush_client.halves import Halves
from kvpush_client.items import (
    Advance,
    Cancel,
    Decline,
    DescribePool,
    FirstToken,
    Handoff,
    Identity,
    Item,
    Prompt,
    Reserve,
    Role,
    Sender,
    half_of,
)
from kvpush_client.layout import Blocks, Layout
from kvpush_client.link import DAEMON_SILENCE, Link, MakeLink
from kvpush_client.pool import Pool
from kvpush_client.retry import Retries
from kvpush_client.wire import Malformed

__all__ = ["Identity", "Prompt", "Role", "Sender", "Session"]

_log = logging.getLogger(__name__)

_EXCHANGE = 5.0  # seconds that fd.sock may take to answer
_GOODBYE = 1.0  # seconds that the daemon may take to end a session


class Session:
    """Connects in the background, stays connected, registers again by itself.

    No method but `wait_ready`, `wait` and `close` blocks, and none raises because the daemon is away: what
    was asked for then ends by an event, as anything else that goes wrong.

    A scheduler's session promises one end for each half that it opened: one ReservationEnded, followed by
    one ReservationReleased unless it said `released`; one HandoffEnded. Late and doubled events are
    dropped. When the daemon is lost, reservations end at once, unreleased; their release, and the end of
    handoffs, come when nothing can touch the blocks any more: when the daemon and its movers are dead, or
    when it, or one that has its lock from it, welcomes this launch again. What is posted while the daemon is
    away ends at once.

    A worker's session opens no halves: it passes on ends of its engine's reservations and what was rejected
    as they come, and after Disconnected nothing more is said of them.

    Methods may be called from any thread. A session does not survive fork(): start it after the engine
    has forked, in the process that uses it; a child that inherits a started one must not touch it.
    """

    def __init__(
        self,
        runtime_dir: Path,
        identity: Identity,
        pool: Pool | None = None,
        layout: Layout | None = None,
        daemon_silence: float = DAEMON_SILENCE,
        link: MakeLink = Link,
    ) -> None:
        """A worker brings its pool and how it is cut; a scheduler brings neither. A daemon that answers
        nothing for `daemon_silence` seconds is given up. `link` makes a stream.

        Raises ValueError where no daemon could be told so.
        """
        if {identity.role is Role.WORKER} != {pool is not None, layout is not None}:
            raise ValueError("a worker's session needs a pool and its layout, a scheduler's has neither")
        hello_wire.check(identity, layout)
        self._runtime_dir = runtime_dir
        self._identity = replace(identity, process=os.urandom(16))
        self._pool = pool
        self._layout = layout
        self._daemon_silence = daemon_silence
        self._dial = link
        self._events: deque[Event] = deque()
        self._halves = Halves()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None  # dialled; under the lock
        self._open: Link | None = None  # connected, so items can be posted; under the lock
        self._heard: Link | None = None  # takes what needs no answer: see _attend; under the lock
        self._generation = 0
        self._trouble: KvpushClientError | None = None
        self._fences = Fences(self._fenced)  # of generations that were lost
        self._closing = threading.Event()
        self._wake = -1  # an eventfd that ends waits on fd.sock
        self._pid = 0
        self._thread: threading.Thread | None = None

    # --- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to connect, in the background, until `close`."""
        if self._thread is not None or self._closing.is_set():
            raise RuntimeError("a session starts once")
        self._pid = os.getpid()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="kvpush-session", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def wait_ready(self, timeout: float) -> None:
        """Blocks until the session is connected.

        Raises DaemonRefused as soon as the daemon has said no (the session goes on trying, slowly), and
        DaemonUnreachable after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while self._open is None:
                if isinstance(self._trouble, DaemonRefused):
                    raise DaemonRefused(self._trouble.reason, self._trouble.detail)
                left = deadline - time.monotonic()
                if left <= 0 or self._closing.is_set():
                    why = self._trouble or f"no answer at {self._runtime_dir}"
                    raise DaemonUnreachable(f"not connected to kvpushd after {timeout:g} s: {why}")
                self._changed.wait(left)

    @property
    def ready(self) -> bool:
        """The session is connected."""
        return self._open is not None

    def poll(self) -> list[Event]:
        """What happened since the last call, in order."""
        if not self._events:
            return []
        with self._lock:
            events = list(self._events)
            self._events.clear()
            for event in events:
                self._halves.polled(event)
        return events

    def wait(self, timeout: float) -> None:
        """Blocks until there is something to poll, `timeout` seconds at most."""
        with self._lock:
            if not self._events:
                self._changed.wait(timeout)

    def close(self) -> None:
        """Ends the session and its threads; the daemon fences and lets go what it owned. May be repeated.

        What was posted is still sent, if the daemon takes it within a second. In a child that inherited
        the session by fork() it does nothing.
        """
        if self._thread is not None and self._pid != os.getpid():
            return  # the lock may have been held, and gRPC's threads are the parent's
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            link, connected = self._link, self._open is not None
            self._changed.notify_all()
        if self._thread is None:
            return
        atexit.unregister(self.close)
        os.eventfd_write(self._wake, 1)
        if link is not None and connected:
            link.finish()
            self._thread.join(_GOODBYE)
        if link is not None:
            link.cancel()
        self._thread.join()
        os.close(self._wake)

    # --- what an engine says --------------------------------------------------------------------------------

    def reserve(
        self,
        key: TransferKey,
        senders: Sequence[Sender],
        start: int,
        end: int,
        blocks: Sequence[Blocks],
        *,
        lease: float | None = None,
        priority: int = 0,
        label: str = "",
        prompt: bytes = b"",
    ) -> None:
        """These blocks wait for positions [start, end); they stay allocated until their release.

        A key whose reservation is live already is answered by Rejected, and changes nothing.
        """
        self._needs(Role.SCHEDULER)
        frozen = tuple(b.frozen() for b in blocks)
        item = Reserve(key, tuple(senders), start, end, frozen, lease, priority, label, prompt)
        with self._lock:
            if self._open is None:
                end_event = self._halves.refuse(key, Side.RECEIVER, self._away())
                self._happened(end_event or self._halves.duplicate(key))
            elif self._halves.reserve(key, self._generation):
                self._open.post(item)
            else:
                self._happened(self._halves.duplicate(key))

    def handoff(
        self,
        key: TransferKey,
        blocks: Sequence[Blocks],
        *,
        seal: int | None = None,
        lease: float | None = None,
        receiver_engine_id: str = "",
        label: str = "",
        prompts: Sequence[Prompt] = (),
    ) -> None:
        """Opens a handoff, appends blocks to it, seals it, or several of these.

        The blocks stay readable until its end. Nothing happens if its end is waiting to be polled.
        """
        self._needs(Role.SCHEDULER)
        frozen = tuple(b.frozen() for b in blocks)
        item = Handoff(key, frozen, seal, lease, receiver_engine_id, label, tuple(prompts))
        with self._lock:
            if self._open is None:
                end_event = self._halves.refuse(key, Side.SENDER, self._away())
                if end_event is not None:
                    self._happened(end_event)
            elif self._halves.hand_off(key, self._generation):
                self._open.post(item)

    def advance(
        self, key: TransferKey, positions: int, *, first_layer: int = 0, end_layer: int | None = None
    ) -> None:
        """Positions below `positions` are final in layers [first_layer, end_layer) of this worker's pool."""
        self._needs(Role.WORKER)
        self._say(Advance(key, positions, first_layer, end_layer, time.monotonic_ns()))

    def cancel(self, key: TransferKey, side: Side, detail: str = "") -> None:
        """Takes a half back; its end follows. Nothing happens if it is not open."""
        self._needs(Role.SCHEDULER)
        with self._lock:
            if self._open is not None and self._halves.is_open(key, side):
                self._open.post(Cancel(key, side, detail))

    def decline(self, key: TransferKey, senders: Sequence[Sender]) -> None:
        """The senders of this transfer need not send it. Lost if the daemon is away: their lease ends it."""
        self._needs(Role.SCHEDULER)
        self._say(Decline(key, tuple(senders)))

    def first_token(self, key: TransferKey) -> None:
        """The first token has come out, now. For the timeline; lost if the daemon is away."""
        self._needs(Role.SCHEDULER)
        self._say(FirstToken(key, time.time_ns()))

    def _say(self, item: Item) -> None:
        with self._lock:
            if self._heard is not None:
                self._heard.post(item)

    def _needs(self, role: Role) -> None:
        if self._identity.role is not role:
            raise RuntimeError(f"only a {role.value}'s session can do this")

    def _away(self) -> Fault:
        return Fault(Reason.PEER_UNREACHABLE, f"kvpushd is away: {self._trouble or 'not yet connected'}")

    # --- the background thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        retries = Retries(self._closing)
        while not self._closing.is_set():
            connected, trouble = self._attend()
            retries.wait(connected, trouble)
        self._fences.close()

    def _attend(self) -> tuple[bool, KvpushClientError]:
        """One connection, from dialling to its loss: whether it was up, and what ended it."""
        socket = self._runtime_dir / "kvpushd.sock"
        trouble: KvpushClientError = DaemonUnreachable(f"{socket}: given up")
        link: Link | None = None
        lifeline: fdsock.Lifeline | None = None
        lock = b""
        try:
            if (why := obstacle(socket, "is kvpushd running?")) is not None:
                raise DaemonUnreachable(why)
            link = self._dial(socket, self._identity, self._unsayable, self._daemon_silence)
            with self._lock:
                self._link = link
                if self._closing.is_set():
                    link.cancel()
            welcome = link.welcome()
            lock = welcome.lock
            self._fences.welcomed(lock)
            offer = (self._pool.fd, self._pool.nbytes) if self._pool is not None else None
            pool_id, fd = fdsock.exchange(
                self._runtime_dir / "fd.sock", welcome.token, offer, timeout=_EXCHANGE, wake=self._wake
            )
            lifeline = fdsock.Lifeline(fd)
            events = link.events()
            if self._layout is not None:
                link.post(DescribePool(pool_id, self._layout))
                # The daemon has the pool before this process hears so: handoffs may come and end in between.
                with self._lock:
                    self._heard = link
                self._await_pool(events)
            self._connect(link, welcome)
            for event in events:
                self._hear(event)
        except (KvpushClientError, OSError, RuntimeError) as error:  # RuntimeError: no thread is to be had
            trouble = error if isinstance(error, KvpushClientError) else DaemonUnreachable(str(error))
            _log.debug("an attempt ended", exc_info=True)
        finally:
            if link is not None:
                link.close()
            connected = self._lose(trouble, lock, lifeline)
        return connected, trouble

    def _await_pool(self, events: Iterator[DaemonEvent]) -> None:
        for event in events:
            match event:
                case PoolReady():
                    return
                case Refusal(fault):
                    raise DaemonRefused(fault.reason, fault.detail)
                case _:
                    self._hear(event)

    def _connect(self, link: Link, welcome: engine_pb2.Welcome) -> None:
        with self._lock:
            self._generation += 1
            self._open = self._heard = link
            self._trouble = None
            self._happened(Connected(welcome.incarnation, welcome.peer_host, welcome.peer_port))
        _log.info("connected to kvpushd %s at %s", welcome.software, self._runtime_dir)

    def _lose(self, trouble: KvpushClientError, lock: bytes, lifeline: fdsock.Lifeline | None) -> bool:
        """Ends what ends with a connection; whether it was up."""
        with self._lock:
            connected = self._open is not None
            self._link = self._open = self._heard = None
            self._trouble = trouble
            if connected:
                self._events.append(Disconnected(str(trouble)))
                self._events.extend(self._halves.lost(self._generation, self._away()))
            self._changed.notify_all()
        if connected and lifeline is not None:
            self._fences.lost(self._generation, lock, lifeline)
        elif lifeline is not None:
            lifeline.close()
        return connected

    def _happened(self, *events: Event) -> None:
        """Gives events to be polled, and wakes who waits. Under the lock."""
        self._events.extend(events)
        self._changed.notify_all()

    def _fenced(self, generation: int) -> None:
        with self._lock:
            self._happened(*self._halves.fenced(generation))

    def _hear(self, event: DaemonEvent) -> None:
        match event:
            case PoolReady():
                return
            case Refusal(fault):
                _log.warning("kvpushd did not accept an item: %s", fault)
                return
        with self._lock:
            heard = event if self._identity.role is Role.WORKER else self._halves.heard(event)
            match heard:
                case None:
                    _log.debug("dropped, late or doubled: %s", event)
                case Cancel():
                    if self._open is not None:
                        self._open.post(heard)
                case _:
                    self._happened(heard)

    def _unsayable(self, item: Item, error: Malformed) -> None:
        fault = Fault(Reason.INVALID, str(error))
        half = half_of(item)
        if half is None:
            _log.error("an item can't be sent: %s", error)
        else:
            self._hear(Rejected(*half, fault))
