# SPDX-License-Identifier: Apache-2.0
"""Every listener of gRPC, as the socket that it is."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from testing.node import DEADLINE, Node
from tests.fuzz.doors.door import Saying


class BytesDoor:
    """A listener at which bytes are thrown that are no protocol's, or nearly one's."""

    def __init__(
        self, name: str, family: socket.AddressFamily, address: Any, starts: Sequence[bytes]
    ) -> None:
        self.name = name
        self._family = family
        self._address = address
        self._starts = list(starts)

    def sayings(self) -> st.SearchStrategy[Saying]:
        parts = st.one_of(st.sampled_from(self._starts), st.binary(max_size=200))
        return st.lists(parts, min_size=1, max_size=5)

    def say(self, said: Saying) -> None:
        """Ends its side, and waits for the other's end; what is answered is not HTTP's good answer."""
        answer = bytearray()
        with socket.socket(self._family) as sock:
            sock.settimeout(DEADLINE)
            sock.connect(self._address)
            with contextlib.suppress(OSError):  # the other end may have had enough before
                for part in said:
                    sock.sendall(part)
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(1 << 16):
                    answer += part
        assert not re.search(rb"HTTP/\d\.\d [^4]", answer), answer


HTTP = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HTTP2 = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\xff\xff\xff\x01\x05\x00\x00\x00\x01",
    b"\x00\x00\x08\x06\x00\x00\x00\x00\x00pingpong",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def raw_doors(node: Node) -> list[BytesDoor]:
    """Every listener of gRPC, below gRPC."""
    unix = [
        BytesDoor(f"raw-{name}", socket.AF_UNIX, str(node.runtime_dir / f"{name}.sock"), [*HTTP2, HTTP])
        for name in ("kvpushd", "admin")
    ]
    tcp = BytesDoor("raw-peer", socket.AF_INET, ("127.0.0.1", node.port), [*HTTP2, HTTP])
    return [*unix, tcp]
