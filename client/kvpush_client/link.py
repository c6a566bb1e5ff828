# SPDX-License-Identifier: Apache-2.0
"""One gRPC stream to the daemon, from dialling to its loss."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
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

_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also how long a dial may take
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


def _options(silence: float) -> tuple[tuple[str, int], ...]:
    """A stopped daemon keeps its sockets open: only an unanswered ping shows it. A fifth until the question,
    the rest for the answer; current gRPC times that by its general ping timeout (60 s where nothing is said),
    older by the other."""
    answer = int(silence * 800)
    return (
        *_OPTIONS,
        ("grpc.keepalive_time_ms", int(silence * 200)),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),
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
        self._outbox = Outbox()
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=_options(silence))
        call = engine_pb2_grpc.EngineServiceStub(self._channel).Session(self._requests())
        self._responses = iter(call)
        self._cancel: Callable[[], object] = call.cancel

    def _requests(self) -> Iterator[engine_pb2.SessionRequest]:
        yield engine_pb2.SessionRequest(hello=hello_wire.hello_to_wire(self._identity))
        said = 0
        quiet: float | None = None
        while (batch := self._outbox.take(quiet)) != []:
            quiet = None if batch is None else QUIET
            items: list[engine_pb2.EngineItem] = []
            size = 0
            for message in self._sayable(batch or []):
                size += message.ByteSize()
                if items and size > _BATCH_BYTES:
                    yield engine_pb2.SessionRequest(items=items, first=said)
                    said += len(items)
                    items, size = [], message.ByteSize()
                items.append(message)
            yield engine_pb2.SessionRequest(items=items, first=said)
            said += len(items)

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
            response = next(self._responses)
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
        self._cancel()
        self._outbox.close()
        self._channel.close()

    def _trouble(self, error: grpc.RpcError | StopIteration) -> KvpushClientError:
        if not isinstance(error, grpc.Call):
            return DaemonUnreachable(f"{self._socket}: the daemon ended the session")
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
