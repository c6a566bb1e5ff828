# SPDX-License-Identifier: Apache-2.0
"""The service that engines of the node call. Translates and checks; decides nothing."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import structlog
from grpc.aio import EOF  # type: ignore[attr-defined]

from kvpush_client import event_wire, hello_wire, item_wire
from kvpush_client._proto import engine_pb2, engine_pb2_grpc
from kvpush_client.count import Count, Lost
from kvpush_client.event_wire import DaemonEvent, PoolReady, Refusal
from kvpush_client.events import Matched, Rejected
from kvpush_client.items import PROTOCOL, Advance, DescribePool, Identity, Item, Role, Welcome
from kvpush_client.link import MAX_MESSAGE, NOT_YET, QUIET
from kvpush_client.wire import Malformed
from kvpushd.core import fingerprint
from kvpushd.errors import Forbidden, Invalid, KvpushError, OverLimit, Unreachable, Unsupported
from kvpushd.logs import Sparing
from kvpushd.rpc import sockets, status
from kvpushd.rpc.file import File
from kvpushd.rpc.nudge import Nudge

_TOKEN_BYTES = 32
_BATCH = 512  # events in one message
_WORKERS_ITEMS = (DescribePool, Advance)

__all__ = ["EngineDesk", "EngineService", "EngineSession", "PoolReady", "Refusal", "serve_engines"]


class EngineSession:
    """One process of an engine, as long as its stream lasts. Belongs to the event loop's thread."""

    def __init__(self, identity: Identity, *, most_events: int) -> None:
        self.identity = identity
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        """What the bearer of a descriptor shows on fd.sock."""
        self.offered = False
        """The process has made its one offer on fd.sock."""
        self.rejections = 0
        """Items that were not accepted."""
        self._most_events = most_events
        self._events: deque[DaemonEvent] = deque()
        self._nudge = Nudge()
        self._ended = asyncio.Event()
        self._error: KvpushError | None = None

    def __repr__(self) -> str:
        who = self.identity
        return f"<EngineSession {who.engine_id} {who.role.value} {who.rank}>"

    @property
    def outstanding(self) -> int:
        """Events that wait to be written."""
        return len(self._events)

    def tell(self, event: DaemonEvent) -> None:
        """Queues an event; never blocks; a Matched, which nobody waits for, for a moment, to go with others.
        A client that does not read is cut off when too many wait."""
        if self._ended.is_set():
            return
        if len(self._events) >= self._most_events:
            self.end(OverLimit(f"{len(self._events)} events wait to be read: the session is cut off"))
            return
        self._events.append(event)
        self._nudge.soon() if isinstance(event, Matched) else self._nudge.now()

    def answer(self) -> None:
        """Has the client hear something, be it that there are no events: it asks whether the daemon lives."""
        self._nudge.now()

    def end(self, error: KvpushError | None = None) -> None:
        """Ends the stream, at once: with the error's status, or well. What is queued is dropped."""
        if self._ended.is_set():
            return
        self._error = error
        self._ended.set()

    async def next_events(self) -> list[DaemonEvent]:
        """Waits for events; returns all that fit one message, in order; none where only an answer is due."""
        await self._nudge.wait()
        batch = [self._events.popleft() for _ in range(min(_BATCH, len(self._events)))]
        if not self._events:
            self._nudge.done()
        return batch

    async def ended(self) -> None:
        """Waits until `end` was called; raises its error."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error


class EngineDesk(Protocol):
    """Who decides. Called on the event loop's thread; all calls about a session are in order."""

    async def join(self, identity: Identity, session: EngineSession) -> Welcome:
        """Takes the session in; may wait until what the launch left before is fenced.

        Raises KvpushError, or is cancelled because the process went away: then the session never was.
        """

    def item(self, session: EngineSession, item: Item) -> None:
        """What the process says. KvpushError answers it with Rejected, and means that nothing changed."""

    def left(self, session: EngineSession) -> None:
        """The stream is over, for whatever reason: exactly once for each `join` that returned."""


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Takes sessions. One that misbehaves gets a status that says why; the others do not notice."""

    def __init__(
        self,
        desk: EngineDesk,
        *,
        most_events: int = 100_000,
        most_sessions: int = 1024,
        most_items: int = 4096,
        hello_timeout: float = 10.0,
        lock: bytes = b"",
        rejected: Callable[[KvpushError], None] = lambda error: None,
    ) -> None:
        """`most_events` may wait for a client to read them, `most_items` come in one message: what a message
        does is done at one go. `hello_timeout` in seconds; `lock` names the one that the daemon holds, if
        any, for who had a session with another daemon before; `rejected` hears of each hello and each item
        that was refused."""
        self._desk = desk
        self._most_events = most_events
        self._most_sessions = most_sessions
        self._most_items = most_items
        self._hello_timeout = hello_timeout
        self._lock = lock
        self._rejected = rejected
        self._sessions: set[EngineSession] = set()
        self._stopping = False
        self._log = structlog.get_logger("kvpushd.engine")
        self._sparing = Sparing(self._log)

    def __iter__(self) -> Iterator[EngineSession]:
        """The sessions that have been welcomed."""
        return iter(tuple(self._sessions))

    def stop(self) -> None:
        """Welcomes nobody any more: that would say that nothing of what the launch had before can be touched.
        As the daemon ends, only the end of its movers says so."""
        self._stopping = True

    def bearer(self, token: bytes) -> EngineSession | None:
        """The session that was given this token."""
        found = None
        for session in self._sessions:
            # Every token is compared, each in constant time.
            if hmac.compare_digest(session.token, token):
                found = session
        return found

    async def Session(  # type: ignore[override]  # noqa: N802, the proto's name
        self, request_iterator: Any, context: Any
    ) -> None:
        """One session, from its hello to its end."""
        try:
            await self._attend(context)
        except asyncio.CancelledError:
            # The client went away, or the server stops. gRPC would log it as a fault of ours.
            return

    async def _attend(self, context: Any) -> None:
        try:
            session, welcome = await self._admit(context)
        except KvpushError as error:
            self._rejected(error)
            self._sparing.warning(error.reason.name, "engine refused", fault=str(error.fault()))
            await status.abort(context, error)
            return
        failure: KvpushError | None = None
        try:
            self._sessions.add(session)
            self._log.info("engine joined", session=session, software=session.identity.software)
            await self._converse(session, welcome, context)
        except KvpushError as error:
            failure = error
        finally:
            self._sessions.discard(session)
            session.end()
            self._log.info("engine left", session=session, why=str(failure or "the stream ended"))
            self._desk.left(session)
        if failure is not None:
            await status.abort(context, failure)

    async def _admit(self, context: Any) -> tuple[EngineSession, Welcome]:
        try:
            async with asyncio.timeout(self._hello_timeout):
                first = await status.read(context)
        except TimeoutError:
            raise Invalid(f"no hello within {self._hello_timeout:g} s") from None
        if first is EOF or not first.HasField("hello") or first.items:
            raise Invalid("a session begins with a message that holds a hello and nothing else")
        if first.hello.protocol != PROTOCOL:
            raise Unsupported(
                f"the engine speaks protocol {first.hello.protocol} and this kvpushd {PROTOCOL}: "
                "install the same version of both"
            )
        if len(self._sessions) >= self._most_sessions:
            raise OverLimit(f"{len(self._sessions)} sessions are open, as many as are allowed")
        try:
            identity = hello_wire.identity_from_wire(first.hello)
        except Malformed as error:
            raise Invalid(f"hello: {error}") from None
        fingerprint.check(identity.fingerprint)
        self._refuse_at_the_end()
        session = EngineSession(identity, most_events=self._most_events)
        welcome: Welcome | None = None
        try:
            async with self._saying_not_yet(context):
                welcome = await self._desk.join(identity, session)
            self._refuse_at_the_end()
        except BaseException:  # the process may go away in between, too
            if welcome is not None:
                self._desk.left(session)
            raise
        return session, welcome

    @asynccontextmanager
    async def _saying_not_yet(self, context: Any) -> AsyncIterator[None]:
        """A client that waits for its welcome hears meanwhile that the daemon lives."""
        over = asyncio.Event()
        telling = asyncio.ensure_future(self._say_not_yet(context, over))
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(telling, return_exceptions=True)

    async def _say_not_yet(self, context: Any, over: asyncio.Event) -> None:
        """Nothing is cut short: a stream takes one message at a time."""
        while not over.is_set():
            try:
                async with asyncio.timeout(NOT_YET):
                    await over.wait()
            except TimeoutError:
                await context.write(engine_pb2.SessionResponse())

    def _refuse_at_the_end(self) -> None:
        if self._stopping:
            raise Unreachable("the daemon stops")

    async def _converse(self, session: EngineSession, welcome: Welcome, context: Any) -> None:
        """Returns when the client has ended the stream. Raises the error that the session was ended with."""
        first = hello_wire.welcome_to_wire(welcome, session.token, self._lock)
        await context.write(engine_pb2.SessionResponse(welcome=first))
        tasks = [
            asyncio.ensure_future(self._listen(session, context)),
            asyncio.ensure_future(self._speak(session, context)),
            asyncio.ensure_future(session.ended()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _listen(self, session: EngineSession, context: Any) -> None:
        count = Count()
        while True:
            request = await status.read(context)
            if request is EOF:
                return
            if request.HasField("hello"):
                raise Invalid("a second hello")
            if len(request.items) > self._most_items:
                raise Invalid(f"{len(request.items)} items in a message; allowed: {self._most_items}")
            try:
                new = count.new(request.items, request.first if request.HasField("first") else None)
            except Lost as error:
                raise Unreachable(f"the engine's session: {error}") from error
            for message in new:
                self._take(session, message)
            if not request.items:
                session.answer()

    async def _speak(self, session: EngineSession, context: Any) -> None:
        said = 0
        quiet: float | None = QUIET
        while True:
            try:
                async with asyncio.timeout(quiet):
                    events = await session.next_events()
                quiet = QUIET if events else None
            except TimeoutError:
                events, quiet = [], None
            wire = [event_wire.event_to_wire(event) for event in events]
            await context.write(engine_pb2.SessionResponse(events=wire, first=said))
            said += len(wire)

    def _take(self, session: EngineSession, message: engine_pb2.EngineItem) -> None:
        try:
            item = item_wire.item_from_wire(message)
            role = Role.WORKER if isinstance(item, _WORKERS_ITEMS) else Role.SCHEDULER
            if role is not session.identity.role:
                raise Forbidden(f"{type(item).__name__} is for a {role.value} to say")
            self._desk.item(session, item)
        except Malformed as error:
            self._reject(session, message, Invalid(str(error)))
        except KvpushError as error:
            self._reject(session, message, error)

    def _reject(self, session: EngineSession, message: engine_pb2.EngineItem, error: KvpushError) -> None:
        self._rejected(error)
        session.rejections += 1
        if session.rejections == 1:  # of an engine that says nothing right, one line is enough
            self._log.warning("item rejected", session=session, fault=str(error.fault()))
        half = item_wire.half_of_message(message)
        session.tell(Refusal(error.fault()) if half is None else Rejected(*half, error.fault()))


async def serve_engines(
    service: EngineService, path: Path, *, mode: int = sockets.MODE, silence: float = 30.0
) -> tuple[grpc.aio.Server, File]:
    """Opens kvpushd.sock; returns the running server and the socket's file. Keep both: remove the file, then
    stop the server.

    A process that answers nothing for `silence` seconds has its session ended. Raises ConfigError where the
    path can't be bound.
    """
    server = grpc.aio.server(
        # Sessions and what waits to become one; more calls than that are no engines'.
        maximum_concurrent_rpcs=4096,
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.keepalive_permit_without_calls", 1),
            # A tenth until the question, the rest for the answer, which gRPC gives without the interpreter:
            # an engine that holds that for long lives. Current gRPC times it by its general ping timeout,
            # older by the other.
            ("grpc.keepalive_time_ms", int(silence * 100)),
            ("grpc.keepalive_timeout_ms", int(silence * 900)),
            ("grpc.http2.ping_timeout_ms", int(silence * 900)),
            ("grpc.http2.max_pings_without_data", 0),
        ),
    )
    engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server)
    file = sockets.add_port(server, path, mode=mode)
    await server.start()
    return server, file
