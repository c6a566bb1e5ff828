# SPDX-License-Identifier: Apache-2.0
"""The HTTP port."""

from __future__ import annotations

import contextlib
import re
import socket

from hypothesis import strategies as st

from testing.node import DEADLINE, Node
from tests.fuzz.doors.door import Saying

PATHS = ("/metrics", "/healthz", "/readyz")
QUIET = 0.1
"""Seconds without an answer after which no more is said, and then there is an end."""
STATUS = re.compile(rb"^HTTP/\d\.\d (\d{3}) ", re.MULTILINE)

STARTS = [
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /readyz HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: " + b"a/b;q=x," * 500 + b"\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET " + b"/" * 9000 + b" HTTP/1.1\r\n",
    b"\r\n" * 50,
]


class HttpDoor:
    """The HTTP port: bytes that are requests, nearly, or not at all."""

    name = "http"

    def __init__(self, node: Node) -> None:
        port = re.findall(r'"http": ?"[^"]*:(\d+)"', node.log.read_text())[-1]
        self._address = ("127.0.0.1", int(port))

    def sayings(self) -> st.SearchStrategy[Saying]:
        parts = st.one_of(st.sampled_from(STARTS), st.binary(max_size=200))
        return st.lists(parts, min_size=1, max_size=5)

    def say(self, said: Saying) -> None:
        """Whatever it is, each answer is what was asked for or says that the request is no good."""
        for status in self.statuses(b"".join(said)):
            assert status == 200 or 400 <= status < 500, status

    def statuses(self, said: bytes, patience: float = QUIET) -> list[int]:
        """Says it; the statuses of the answers, once the other side has ended the connection.

        After `patience` seconds without an answer there is an end of it here."""
        answer = bytearray()
        with socket.socket() as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.settimeout(DEADLINE)
            sock.connect(self._address)
            sock.sendall(said)
            sock.settimeout(patience)
            try:
                while part := sock.recv(1 << 16):
                    answer += part
            except TimeoutError:
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(DEADLINE)
                while part := sock.recv(1 << 16):
                    answer += part
        return [int(status) for status in STATUS.findall(answer)]
