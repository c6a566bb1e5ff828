# SPDX-License-Identifier: Apache-2.0
"""fd.sock."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from kvpush_client._proto import engine_pb2
from testing.node import DEADLINE, Node
from tests.fuzz.doors.door import Saying
from tests.fuzz.messages import saying


def datagram(path: Path, data: bytes, fds: Sequence[int]) -> tuple[bytes, list[int]]:
    """One datagram to fd.sock, and what it answers. Raises TimeoutError where it does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(str(path))
        socket.send_fds(sock, [data], fds)
        if not data and not fds:
            sock.shutdown(socket.SHUT_WR)
        answer, got, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        return answer, got


class FdDoor:
    """fd.sock: datagrams with all sorts of descriptors."""

    name = "fds"

    def __init__(self, node: Node) -> None:
        self._path = node.runtime_dir / "fd.sock"

    def sayings(self) -> st.SearchStrategy[Saying]:
        kinds = st.lists(st.sampled_from([b"pipe", b"memfd", b"socket", b"folder"]), max_size=10)
        data = st.one_of(saying(engine_pb2.PoolOffer), st.binary(max_size=5000))
        return st.builds(lambda offer, fds: [offer, *fds], data, kinds)

    def say(self, said: Saying) -> None:
        """The first message is the datagram, the others say what comes with it."""
        data, *kinds = said
        with contextlib.ExitStack() as stack:
            fds = [_descriptor(kind, stack) for kind in kinds]
            answer, got = datagram(self._path, data, fds)
        for fd in got:
            os.close(fd)
        assert not got, "a lifeline, for nothing"
        if data or fds:
            assert engine_pb2.PoolAnswer.FromString(answer).fault.detail


def _descriptor(kind: bytes, stack: contextlib.ExitStack) -> int:
    match kind:
        case b"pipe":
            fd, other = os.pipe()
            stack.callback(os.close, other)
        case b"memfd":
            fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
        case b"socket":
            fd = socket.socket().detach()
        case _:
            fd = os.open("/", os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd
