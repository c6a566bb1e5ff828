# SPDX-License-Identifier: Apache-2.0
"""What a daemon dials."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from typing import Any

import grpc
from hypothesis import strategies as st

from kvpush_client._proto import peer_pb2
from kvpush_client.events import ReservationEnded, ReservationReleased, Side, TransferKey
from kvpush_client.items import Sender
from testing.node import DEADLINE
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.daemon_kit import eventually
from tests.fuzz.doors.door import Saying
from tests.fuzz.messages import saying


class SenderDoor:
    """The daemon's own dialing: the node that it reaches says what it likes."""

    name = "sender"

    def __init__(self, receiver: Engine, *, holds: bool = False) -> None:
        """Or, if it `holds`, it says nothing, and the link stays up: what it was told of stays true."""
        self._receiver = receiver
        self._holds = holds
        self._says: Saying = ()
        self._let_go, self._gone = threading.Event(), threading.Event()
        self.described: peer_pb2.ReceiverEngine | None = None
        self.hello = peer_pb2.PeerHello()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers([_Link(self)])
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        """Takes no more links."""
        self._server.stop(None).wait()

    def answer(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """One link: after the first engine all that is to be said, then its end."""
        self.hello = peer_pb2.LinkRequest.FromString(next(requests)).hello
        if self._says and self._says[0] == b"raw":
            yield from self._says[1:]
            return
        hello = peer_pb2.PeerHello(protocol=1, node="f", boot=b"b" * 16, software="fuzz", silence_ms=10_000)
        yield peer_pb2.LinkResponse(hello=hello).SerializeToString()
        for data in requests:
            if self._let_go.is_set():
                self._gone.set()
                return
            for item in peer_pb2.LinkRequest.FromString(data).items:
                if item.HasField("engine"):
                    self.described = item.engine
                    answer = peer_pb2.ReceiverEngineAnswer(
                        incarnation=item.engine.incarnation, sender_engine_id=item.engine.sender_engine_id
                    )
                    fine = peer_pb2.SenderItem(engine_answer=answer)
                    yield peer_pb2.LinkResponse(items=[fine]).SerializeToString()
                if item.HasField("beat"):
                    yield peer_pb2.LinkResponse(
                        items=[peer_pb2.SenderItem(beat=peer_pb2.Beat())]
                    ).SerializeToString()
                if item.HasField("announce") and not self._holds:
                    for said in self._says:
                        yield _about(said, item.announce)
                    return

    def sayings(self) -> st.SearchStrategy[Saying]:
        responses = st.lists(saying(peer_pb2.LinkResponse), max_size=6)
        return st.one_of(responses, responses.map(lambda rest: [b"raw", *rest]))

    def hold(self) -> peer_pb2.ReceiverEngine:
        """Has the daemon describe the engine that receives, unless it has, and takes the reservation back."""
        self._let_go.clear()
        self._gone.clear()
        while (described := self.described) is None:
            key = new_key()
            ghost = Sender("ghost", "127.0.0.1", self._port)
            self._receiver.reserve(key, ghost, range(4), 4 * BLOCK, lease=DEADLINE)
            # It ends at once where the link that was let go is still on its way down.
            eventually(partial(self._described_or_ended, key))
            self._receiver.scheduler.cancel(key, Side.RECEIVER)
            self._receiver.wait_for(ReservationEnded, key)
        return described

    def _described_or_ended(self, key: TransferKey) -> bool:
        ended = (isinstance(event, ReservationEnded) and event.key == key for event in self._receiver.heard)
        return self.described is not None or any(ended)

    def let_go(self) -> None:
        """Ends the link that it holds, if it does."""
        if self.described is None:
            return
        self._let_go.set()
        self._gone.wait(DEADLINE)
        self.described = None

    def say(self, said: Saying) -> None:
        """A reservation that reaches the liar, and ends."""
        self._says = said
        key = new_key()
        ghost = Sender("ghost", "127.0.0.1", self._port)
        self._receiver.reserve(key, ghost, range(4), 4 * BLOCK, lease=DEADLINE)
        if not self._receiver.wait_for(ReservationEnded, key).released:
            self._receiver.wait_for(ReservationReleased, key)


def _about(data: bytes, announced: peer_pb2.Announce) -> bytes:
    """The same message, but that what names a transfer names this one, where it can be read."""
    try:
        response = peer_pb2.LinkResponse.FromString(data)
    except Exception:  # noqa: BLE001, any other bytes go as they are
        return data
    for item in response.items:
        kind = item.WhichOneof("item")
        if kind not in (None, "beat", "engine_answer"):
            body = getattr(item, kind)
            body.key.CopyFrom(announced.key)
            body.incarnation = announced.incarnation
    return response.SerializeToString()


class _Link(grpc.GenericRpcHandler):
    def __init__(self, door: SenderDoor) -> None:
        self._door = door

    def service(self, details: Any) -> Any:
        """Every method is the link."""
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: self._door.answer(requests))
