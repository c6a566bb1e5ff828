# SPDX-License-Identifier: Apache-2.0
"""Messages and descriptors between the daemon and a mover, over one end of a stream socketpair.

Each message is its length, four bytes, big-endian, and its bytes. A stream and not datagrams, since a list of
a hundred thousand blocks is larger than a datagram may be. A descriptor travels with the first byte of its
message, and so is there before the message is whole. The length's top bit says that there is one: where none
comes, for want of room in either process, no other message's is taken for it.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import sys
from collections import deque

HEADER_BYTES = 4
# 100k block ids on each side are 0.6 MB; what is far beyond is not a message.
MAX_MESSAGE_BYTES = 256 << 20
_CARRIES = 1 << 31
_CHUNK = 1 << 18
_INT = array.array("i").itemsize

Letter = tuple[bytes, int | None]
"""A message, and the descriptor that came with it, if one did: whoever receives it closes it."""


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
        self._came: deque[int | None] = deque()
        """For each message to come that carries a descriptor: which, or none where it was lost here."""

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits for the socket to become writable."""
        return bool(self._outgoing)

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Queues a message and sends what the socket takes. The descriptor stays the caller's; where this
        process can't pass it on, being out of descriptors, say, the message comes without it.

        Raises LinkClosed, and ValueError where the message is too large for a link.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message):,} bytes, expected at most {MAX_MESSAGE_BYTES:,}")
        kept = None if descriptor is None else _copied(descriptor)
        head = len(message) if kept is None else len(message) | _CARRIES
        frame = bytearray(head.to_bytes(HEADER_BYTES, "big"))
        frame += message
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
            except OSError as error:
                if descriptor is None or error.errno != errno.ETOOMANYREFS:
                    raise LinkClosed from error
                # This user has as many under way as it may: it goes without.
                frame[0] &= ~(_CARRIES >> 24)
                sent = 0
            if descriptor is not None:
                os.close(descriptor)
            if sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[sent:], None)

    def receive(self) -> list[Letter]:
        """The messages that have come, without waiting.

        Raises LinkClosed once there are no more to come, LinkBroken where what has come is none.
        """
        closed = False
        while True:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    _CHUNK, socket.CMSG_LEN(_INT), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                closed = True
                break
            # A read ends with the bytes that a descriptor travels with, so it has one at most.
            if ancillary or flags & socket.MSG_CTRUNC:
                self._came.append(_descriptor_of(ancillary))
            if not data:
                closed = True
                break
            self._incoming += data
        messages = self._split()
        if closed and not messages:
            raise LinkClosed
        return messages

    def close(self) -> None:
        """Closes the socket and every descriptor that was not handed out or not sent."""
        self._socket.close()
        for descriptor in (*self._came, *(kept for _, kept in self._outgoing)):
            if descriptor is not None:
                os.close(descriptor)
        self._came.clear()
        self._outgoing.clear()

    def _split(self) -> list[Letter]:
        messages: list[Letter] = []
        begin = 0
        while len(self._incoming) - begin >= HEADER_BYTES:
            head = int.from_bytes(self._incoming[begin : begin + HEADER_BYTES], "big")
            size = head & ~_CARRIES
            if size > MAX_MESSAGE_BYTES:
                self._came.extend(descriptor for _, descriptor in messages)
                raise LinkBroken(f"a message of {size:,} bytes, expected at most {MAX_MESSAGE_BYTES:,}")
            end = begin + HEADER_BYTES + size
            if len(self._incoming) < end:
                break
            descriptor = self._came.popleft() if head & _CARRIES and self._came else None
            messages.append((bytes(self._incoming[begin + HEADER_BYTES : end]), descriptor))
            begin = end
        del self._incoming[:begin]
        return messages


def _copied(descriptor: int) -> int | None:
    """None where this process has no room for one more."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise
        return None


def _descriptor_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """What has come; None where this process had no room for it."""
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(payload) >= _INT:
            return int.from_bytes(payload[:_INT], sys.byteorder)
    return None
