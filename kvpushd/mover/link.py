# SPDX-License-Identifier: Apache-2.0
"""Messages and descriptors between the daemon and a mover, over one end of a stream socketpair.

Each message is its length, four bytes, big-endian, and its bytes. A stream and not datagrams, since a list of
a hundred thousand blocks is larger than a datagram may be. A descriptor travels with the first byte of its
message, and so is there before the message is whole.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque

HEADER_BYTES = 4
# 100k block ids on each side are 0.6 MB; what is far beyond is not a message.
MAX_MESSAGE_BYTES = 256 << 20
_CHUNK = 1 << 18
_MAX_FDS = 16


class LinkClosed(Exception):
    """The other end is closed: its process is dead or about to be."""


class LinkBroken(LinkClosed):
    """The other end says what is no message: nothing that it says can be read any more."""


class Link:
    """One end. Never blocks; the caller waits for the socket to become readable or writable."""

    def __init__(self, end: socket.socket) -> None:
        """Takes over `end`, one end of a socketpair(AF_UNIX, SOCK_STREAM)."""
        end.setblocking(False)
        self._socket = end
        self._outgoing: deque[tuple[memoryview, int | None]] = deque()
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits for the socket to become writable."""
        return bool(self._outgoing)

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Queues a message and sends what the socket takes. The descriptor stays the caller's.

        Raises LinkClosed, and ValueError where the message is too large for a link.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message):,} bytes, expected at most {MAX_MESSAGE_BYTES:,}")
        kept = None if descriptor is None else os.dup(descriptor)
        frame = len(message).to_bytes(HEADER_BYTES, "big") + message
        self._outgoing.append((memoryview(frame), kept))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes. Raises LinkClosed."""
        while self._outgoing:
            frame, descriptor = self._outgoing[0]
            ancillary = []
            if descriptor is not None:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            try:
                sent = self._socket.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                raise LinkClosed from error
            if descriptor is not None:
                os.close(descriptor)
            if sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[sent:], None)

    def receive(self) -> list[bytes]:
        """The messages that have come, without waiting.

        Raises LinkClosed once there are no more to come, LinkBroken where what has come is none.
        """
        closed = False
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _CHUNK, socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                closed = True
                break
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    self._descriptors.extend(numbers)
            if not data:
                closed = True
                break
            self._incoming += data
        messages = self._split()
        if closed and not messages:
            raise LinkClosed
        return messages

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the message at hand; the caller's from now on."""
        return self._descriptors.popleft() if self._descriptors else None

    def close(self) -> None:
        """Closes the socket and every descriptor that was not taken or not sent."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        for _, descriptor in self._outgoing:
            if descriptor is not None:
                os.close(descriptor)
        self._outgoing.clear()

    def _split(self) -> list[bytes]:
        messages: list[bytes] = []
        begin = 0
        while len(self._incoming) - begin >= HEADER_BYTES:
            size = int.from_bytes(self._incoming[begin : begin + HEADER_BYTES], "big")
            if size > MAX_MESSAGE_BYTES:
                raise LinkBroken(f"a message of {size:,} bytes, expected at most {MAX_MESSAGE_BYTES:,}")
            end = begin + HEADER_BYTES + size
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[begin + HEADER_BYTES : end]))
            begin = end
        del self._incoming[:begin]
        return messages
