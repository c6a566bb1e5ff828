# SPDX-License-Identifier: Apache-2.0
"""kvpushd.sock."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from concurrent import futures

import grpc
from hypothesis import strategies as st

from kvpush_client import hello_wire
from kvpush_client._proto import engine_pb2
from kvpush_client.items import Identity, Role
from kvpush_client.pool import Pool
from testing.node import DEADLINE, Node
from testing.rank import FINGERPRINT, layout
from tests.fuzz.doors.door import Saying, check, stream
from tests.fuzz.doors.fds import datagram
from tests.fuzz.messages import saying


class EngineDoor:
    """kvpushd.sock, as a scheduler, as a worker with a pool, or as nobody."""

    name = "engine"

    def __init__(self, node: Node) -> None:
        self._node = node
        self._target = f"unix:{node.runtime_dir}/kvpushd.sock"
        self._pool = Pool.create(layout(16).pool_bytes, "fuzz")

    def sayings(self) -> st.SearchStrategy[Saying]:
        items = st.lists(saying(engine_pb2.SessionRequest), max_size=6)
        hellos = st.sampled_from([b"scheduler", b"worker", b"pool"])
        return st.one_of(
            st.builds(lambda who, rest: [who, *rest], hellos, items),
            items.map(lambda rest: [b"nobody", *rest]),
        )

    def say(self, said: Saying) -> None:
        """The first message names who says the rest."""
        who, *rest = said
        if who == b"nobody":
            stream(self._target, "/kvpush.v1.EngineService/Session", rest)
            return
        role = Role.SCHEDULER if who == b"scheduler" else Role.WORKER
        identity = Identity(f"f-{secrets.token_hex(4)}", "l", role, fingerprint=FINGERPRINT)
        hello = engine_pb2.SessionRequest(hello=hello_wire.hello_to_wire(identity)).SerializeToString()
        if who != b"pool":
            stream(self._target, "/kvpush.v1.EngineService/Session", [hello, *rest])
            return
        self._with_pool(hello, rest)

    def _with_pool(self, hello: bytes, rest: Saying) -> None:
        """Its layouts are those of the pool that it has offered."""
        with grpc.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            welcomed: futures.Future[bytes] = futures.Future()

            def requests() -> Iterator[bytes]:
                yield hello
                pool_id = welcomed.result(DEADLINE)
                for data in rest:
                    yield _naming(data, pool_id, self._pool.nbytes)

            call = channel.stream_stream("/kvpush.v1.EngineService/Session")(requests(), timeout=DEADLINE)
            try:
                answer = engine_pb2.SessionResponse.FromString(next(call))
                welcomed.set_result(self._offer(answer.welcome.token))
                for _ in call:
                    pass
            except grpc.RpcError as error:
                check(error)

    def _offer(self, token: bytes) -> bytes:
        data = engine_pb2.PoolOffer(token=token, pool_bytes=self._pool.nbytes).SerializeToString()
        answer, fds = datagram(self._node.runtime_dir / "fd.sock", data, [self._pool.fd])
        for fd in fds:
            os.close(fd)
        return engine_pb2.PoolAnswer.FromString(answer).pool_id


def _naming(data: bytes, pool_id: bytes, nbytes: int) -> bytes:
    """The same message, but that its layouts are of this pool, where it can be read."""
    try:
        request = engine_pb2.SessionRequest.FromString(data)
    except Exception:  # noqa: BLE001, any other bytes go as they are
        return data
    for said in request.items:
        if said.HasField("describe_pool"):
            said.describe_pool.pool_id = pool_id
            said.describe_pool.layout.pool_bytes = nbytes
    return request.SerializeToString()
