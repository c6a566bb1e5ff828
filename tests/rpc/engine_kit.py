# SPDX-License-Identifier: Apache-2.0
"""Clients of the engines' sockets that send what they like."""

from __future__ import annotations

import array
import os
import queue
import socket
from pathlib import Path

import grpc
import pytest

from kvpush_client import hello_wire
from kvpush_client._proto import engine_pb2
from kvpush_client._proto.engine_pb2_grpc import EngineServiceStub
from kvpush_client.items import Identity
from kvpush_client.link import REASON_KEY
from kvpush_client.session import Session
from testing.front import DEADLINE, scheduler


class Client:
    """A stream that says what it is told to."""

    def __init__(self, runtime_dir: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{runtime_dir}/kvpushd.sock")
        self._requests: queue.SimpleQueue[engine_pb2.SessionRequest | None] = queue.SimpleQueue()
        self.call = EngineServiceStub(self._channel).Session(iter(self._requests.get, None))

    def send(self, request: engine_pb2.SessionRequest) -> None:
        self._requests.put(request)

    def hello(self, identity: Identity) -> None:
        self.send(engine_pb2.SessionRequest(hello=hello_wire.hello_to_wire(identity)))

    def welcome(self, identity: Identity) -> engine_pb2.Welcome:
        self.hello(identity)
        return next(self.call).welcome

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ends: the code, and the reason's name."""
        with pytest.raises(grpc.RpcError) as raised:
            for _ in self.call:
                pass
        assert isinstance(raised.value, grpc.Call)
        return raised.value.code(), dict(raised.value.trailing_metadata() or ()).get(REASON_KEY, "")

    def finish(self) -> None:
        self._requests.put(None)

    def close(self) -> None:
        self.call.cancel()
        self.finish()
        self._channel.close()


def send_datagram(path: Path, data: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
    """One datagram to fd.sock, and what it answers: bytes and descriptors; nothing of both: closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(str(path))
        socket.send_fds(sock, [data], fds)
        answer, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
        got = array.array("i")
        for _, _, payload in ancillary:
            got.frombytes(payload)
        return answer, list(got)


def serves(runtime_dir: Path) -> bool:
    """The daemon takes a session, with all that belongs to it."""
    session = Session(runtime_dir, scheduler("probe"))
    session.start()
    session.wait_ready(DEADLINE)
    session.close()
    return True


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
