# SPDX-License-Identifier: Apache-2.0
"""The peer port."""

from __future__ import annotations

import secrets

from hypothesis import strategies as st

from kvpush_client._proto import peer_pb2
from testing.node import Node
from tests.fuzz.doors.door import Saying, stream
from tests.fuzz.doors.sender import SenderDoor
from tests.fuzz.messages import saying

WAYS = 20
"""Links that describe an engine behind one and the same inlet, one after another."""


class PeerDoor:
    """The peer port, as a node that receives; and as one that is dialed, and sends."""

    name = "peer"

    def __init__(self, node: Node, true: SenderDoor) -> None:
        """`true` holds what the node says of an engine: the inlet is real."""
        self._target = f"127.0.0.1:{node.port}"
        self._true = true
        self._ways = 0

    def sayings(self) -> st.SearchStrategy[Saying]:
        requests = st.lists(saying(peer_pb2.LinkRequest), max_size=6)
        return st.one_of(
            requests.map(lambda rest: [b"hello", *rest]),
            requests.map(lambda rest: [b"described", *rest]),
            st.lists(saying(peer_pb2.LinkRequest), max_size=2).map(lambda rest: [b"raw", *rest]),
        )

    def say(self, said: Saying) -> None:
        """The first message says how far the link has come."""
        how, *rest = said
        hello = peer_pb2.PeerHello(
            protocol=1, node=f"f-{secrets.token_hex(4)}", boot=b"b" * 16, software="fuzz", silence_ms=10_000
        )
        described = self._true.hold() if how == b"described" else None
        if described is not None:
            hello = self._true.hello
        opening = [peer_pb2.LinkRequest(hello=hello).SerializeToString()]
        if how == b"raw":
            opening = []
        if described is not None:
            engine = peer_pb2.ReceiverEngine()
            engine.CopyFrom(described)
            engine.sender_engine_id = "s"
            item = peer_pb2.ReceiverItem(engine=engine)
            opening.append(peer_pb2.LinkRequest(items=[item]).SerializeToString())
        stream(self._target, "/kvpush.v1.PeerService/Link", [*opening, *rest])
        if self._true.described is not None:
            self._ways += 1
            if self._ways % WAYS == 0:
                self.rest()

    def rest(self) -> None:
        """Lets the inlet go: its agent keeps its own end of each connection that was made to it."""
        self._true.let_go()
