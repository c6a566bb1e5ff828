# SPDX-License-Identifier: Apache-2.0
"""One gRPC stream to the daemon, from dialling to its loss."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc

from kvpush_client import event_wire, hello_wire, item_wire
from kvpush_client._proto import engine_pb2, engine_pb2_grpc
from kvpush_client.count import Count, Lost
from kvpush_client.errors import DaemonRefused, DaemonUnreachable, KvpushClientError
from kvpush_client.event_wire import DaemonEvent
from kvpush_client.events import Reason
from kvpush_client.items import Advance, Handoff, Identity, Item, Reserve, merged
from kvpush_client.wire import Malformed

MAX_MESSAGE = 16 << 20
"""Bytes of one gRPC message, either way."""
SPACING = 0.005
"""Seconds from one message to the next where that one only says how far a forward pass has come. A message
costs the daemon a wake of two threads, whatever it says: where these wait for a processor, more came than it
could take, and its news of a burst of prompts was 0.1 to 0.4 s old. The end of a pass is said at once."""
QUIET = 1.0
"""Seconds after what was said last, either way, until it is said how much that was: so loss is noticed."""
REASON_KEY = "kvpush-reason"
"""Trailing metadata that carries the name of a Reason."""

_BATCH = 512  # items in a message
_BATCH_IDS = 200_000  # block ids in a message, at most 5 bytes each: far below MAX_MESSAGE
_BATCH_BYTES = MAX_MESSAGE // 4  # in a message of several items; one by itself has 7 MiB at most
_BACKLOG = 200_000  # items not yet taken by the stream

DAEMON_SILENCE = 10.0
"""Seconds without an answer after which a daemon counts as stopped, as long as a link's silence. Less takes a
daemon on a busy machine for a stopped one, and each time all of the engine's transfers end."""
NOT_YET = 0.2
"""Seconds from one word to the next to who waits to be welcomed."""

_OPTIONS = (
    ("grpc.min_reconnect_backoff_ms", 5000),  # also how long a dial may take
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


class Outbox:
    """Items on their way to the stream. Putting one costs a fraction of a microsecond and never blocks."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._closed = False
        self._taken = 0.0

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, item: Item) -> None:
        """Appends."""
        self._queue.put(item)

    def take(self, patience: float | None = None) -> list[Item] | None:
        """Waits for an item; returns all that fit one message, in order. Empty: closed. None: no item came
        within `patience` seconds."""
        batch: list[Item] = []
        ids = 0
        wait = patience
        try:
            while not self._closed and len(batch) < _BATCH and ids < _BATCH_IDS:
                item = self._queue.get(timeout=wait)
                if item is None:
                    self._closed = True
                else:
                    batch.append(item)
                    if isinstance(item, Reserve | Handoff):
                        ids += sum(len(b.ids) for b in item.blocks)
                    can_wait = wait != 0 and isinstance(item, Advance) and item.end_layer is not None
                    wait = max(self._taken + SPACING - time.monotonic(), 0.0) if can_wait else 0.0
        except queue.Empty:
            if not batch:
                return None
        self._taken = time.monotonic()
        return batch

    def close(self) -> None:
        """What was put before is still taken."""
        self._queue.put(None)


class Link:
    """A stream and its channel. One thread opens it and reads events; any thread posts and cancels."""

    def __init__(
        self,
        socket: Path,
        identity: Identity,
        unsayable: Callable[[Item, Malformed], None],
        silence: float = DAEMON_SILENCE,
    ) -> None:
        """`unsayable` is called, on a thread of gRPC's, for an item that fits no message. A daemon that
        answers nothing for `silence` seconds is given up."""
        self._socket = socket
        self._identity = identity
        self._unsayable = unsayable
        self._silence = silence
        self._silent = False
        self._heard_at = time.monotonic()
        self._over = threading.Event()
        self._outbox = Outbox()
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        call = engine_pb2_grpc.EngineServiceStub(self._channel).Session(self._requests())
        self._responses = self._noted(call)
        self._cancel: Callable[[], object] = call.cancel
        self._watching = threading.Thread(target=self._watch, name="kvpush-watch", daemon=True)
        try:
            self._watching.start()
        except RuntimeError:  # no thread is to be had
            self.close()
            raise

    def _requests(self) -> Iterator[engine_pb2.SessionRequest]:
        yield engine_pb2.SessionRequest(hello=hello_wire.hello_to_wire(self._identity))
        said = 0
        every = self._silence / 4
        asked_at, patience = time.monotonic(), every
        while (batch := self._outbox.take(patience)) != []:
            patience = every if batch is None else min(QUIET, every)
            items: list[engine_pb2.EngineItem] = []
            size = 0
            for message in self._sayable(batch or []):
                size += message.ByteSize()
                if items and size > _BATCH_BYTES:
                    yield engine_pb2.SessionRequest(items=items, first=said)
                    said += len(items)
                    items, size = [], message.ByteSize()
                items.append(message)
            if items:
                yield engine_pb2.SessionRequest(items=items, first=said)
                said += len(items)
            if not items or time.monotonic() >= asked_at + every:
                asked_at = time.monotonic()
                yield engine_pb2.SessionRequest(first=said)  # which is answered

    def _noted(self, responses: Iterable[engine_pb2.SessionResponse]) -> Iterator[engine_pb2.SessionResponse]:
        for response in responses:
            self._heard_at = time.monotonic()
            yield response

    def _watch(self) -> None:
        """Gives up a daemon that answers nothing: a stopped one keeps its sockets open.

        gRPC's own pings would show that, too; but they fail where the whole machine stands still for a while.
        """
        look = self._silence / 8
        due = time.monotonic() + look
        while not self._over.wait(max(due - time.monotonic(), 0.0)):
            now = time.monotonic()
            if now - due > look:
                # This process stood still (a stopped VM, a debugger): what the daemon says meanwhile waits in
                # the socket, unread.
                self._heard_at += now - due
            if now - self._heard_at > self._silence:
                self._silent = True
                self.cancel()
                return
            due = now + look

    def _sayable(self, batch: list[Item]) -> Iterator[engine_pb2.EngineItem]:
        """A batch as messages, less what fits none. Raises nothing: that would end the session, and with it
        all that the engine's other requests have under way."""
        for item in _merged(batch):
            try:
                yield item_wire.item_to_wire(item)
            except Malformed as error:
                self._unsayable(item, error)
                instead = item_wire.instead_of(item)
                if instead is not None:
                    with suppress(Malformed):  # its key fits no message either
                        yield item_wire.item_to_wire(instead)

    def welcome(self) -> engine_pb2.Welcome:
        """Waits for the daemon's answer, for as long as it is alive and has not given one.

        Raises DaemonUnreachable or DaemonRefused.
        """
        try:
            response = next(said for said in self._responses if said.ListFields())  # nothing = not yet
        except (grpc.RpcError, StopIteration) as error:
            raise self._trouble(error) from error
        if response.HasField("first"):
            raise DaemonUnreachable(f"{self._socket}: the Welcome was lost on the way")
        if not response.HasField("welcome"):
            raise DaemonRefused(Reason.UNSUPPORTED, f"{self._socket}: the first answer is not a Welcome")
        return response.welcome

    def events(self) -> Iterator[DaemonEvent]:
        """What the daemon says, until the stream is lost.

        Raises DaemonUnreachable or DaemonRefused: the stream has ended.
        """
        count = Count()
        try:
            for response in self._responses:
                first = response.first if response.HasField("first") else None
                for message in count.new(response.events, first):
                    event = event_wire.event_from_wire(message)
                    if event is not None:
                        yield event
        except grpc.RpcError as error:
            raise self._trouble(error) from error
        except Malformed as error:
            raise DaemonRefused(Reason.UNSUPPORTED, f"{self._socket}: {error}") from error
        except Lost as error:
            raise DaemonUnreachable(f"{self._socket}: {error}") from error
        raise DaemonUnreachable(f"{self._socket}: the daemon ended the session")

    def post(self, item: Item) -> None:
        """Queues an item. A daemon that lives but takes none is given up when too many wait."""
        self._outbox.put(item)
        if len(self._outbox) > _BACKLOG:
            self.cancel()

    def finish(self) -> None:
        """Says goodbye after what is queued: a daemon that lives ends the stream."""
        self._outbox.close()

    def cancel(self) -> None:
        """Ends the stream from any thread; the reader hears of it."""
        self._cancel()

    def close(self) -> None:
        """Ends the stream and its threads."""
        self._over.set()
        if self._watching.is_alive():
            self._watching.join()
        self._cancel()
        self._outbox.close()
        self._channel.close()

    def _trouble(self, error: grpc.RpcError | StopIteration) -> KvpushClientError:
        if not isinstance(error, grpc.Call):
            return DaemonUnreachable(f"{self._socket}: the daemon ended the session")
        if self._silent:
            return DaemonUnreachable(f"{self._socket}: the daemon was silent for {self._silence:g} s")
        code, details = error.code(), error.details() or ""
        for name, value in error.trailing_metadata() or ():
            if name == REASON_KEY:
                reason = _reason(value)
                # That is no answer to what was asked for, and the next try may get one.
                if reason is Reason.PEER_UNREACHABLE:
                    return DaemonUnreachable(f"{self._socket}: {details}")
                return DaemonRefused(reason, details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return DaemonRefused(Reason.UNSUPPORTED, f"{self._socket} serves no kvpush.v1.EngineService")
        return DaemonUnreachable(f"{self._socket}: {code.name.lower()}: {details}")


MakeLink = Callable[[Path, Identity, Callable[[Item, Malformed], None], float], Link]
"""Opens a stream to the daemon at a socket, as Link's constructor does."""


def _merged(batch: list[Item]) -> list[Item]:
    """Where the stream is behind, many wait that a worker has said layer by layer."""
    try:
        return merged(batch)
    except Exception:  # noqa: BLE001, a value that can't be compared: each item is judged by itself
        return batch


def _reason(name: str | bytes) -> Reason:
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    return Reason[text] if text in Reason.__members__ else Reason.UNSPECIFIED
