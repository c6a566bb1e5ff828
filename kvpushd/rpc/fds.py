# SPDX-License-Identifier: Apache-2.0
"""fd.sock: where an engine's processes hand over their pools and get the lifeline."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog
from google.protobuf.message import DecodeError

from kvpush_client import wire
from kvpush_client._proto import engine_pb2
from kvpush_client.items import Role
from kvpushd.errors import BadMemory, Forbidden, Invalid, KvpushError
from kvpushd.logs import Sparing
from kvpushd.rpc.engine import EngineSession

_MAX_OFFER = 4096  # bytes
_MAX_FDS = 8  # a datagram with more is refused; the kernel closes those that found no room
_INT = array.array("i").itemsize
_UCRED = struct.Struct("3i")  # pid, uid, gid


class PoolDesk(Protocol):
    """Who decides about pools. Called on the event loop's thread."""

    def offer(self, session: EngineSession, fd: int, nbytes: int, uid: int) -> bytes:
        """Takes a worker's pool: returns its id, and owns `fd` from then on.

        `uid` is the process's, as the kernel says. Raises KvpushError (BadMemory...): then `fd` stays the
        caller's.
        """


class FdService:
    """Answers one datagram per connection. Whatever came with a bad one is closed; the service goes on."""

    def __init__(
        self,
        listener: socket.socket,
        bearer: Callable[[bytes], EngineSession | None],
        desk: PoolDesk,
        lifeline: int,
        *,
        timeout: float = 5.0,
        most_connections: int = 64,
        rejected: Callable[[KvpushError], None] = lambda error: None,
    ) -> None:
        """`listener` is a SOCK_SEQPACKET socket, `lifeline` the read end of a pipe: both stay the caller's.

        A connection that says nothing within `timeout` seconds is closed; beyond `most_connections` at a
        time, the oldest goes for one more: an engine speaks as it comes, and who only holds on to connections
        keeps no engine out. `rejected` hears of each offer that was refused.
        """
        self._listener = listener
        self._bearer = bearer
        self._desk = desk
        self._lifeline = lifeline
        self._timeout = timeout
        self._rejected = rejected
        self._most = most_connections
        self._attending: dict[asyncio.Task[None], None] = {}
        """One for each open connection, the oldest first."""
        self._sparing = Sparing(structlog.get_logger("kvpushd.fds"))

    async def serve(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await _readable(self._listener)
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    # Out of descriptors, say. The connection stays in the backlog: try again, in a while.
                    self._sparing.warning("accept", "can't accept on fd.sock", error=str(error))
                    await asyncio.sleep(0.1)
                else:
                    self._make_room()
                    task = group.create_task(self._attend(connection))
                    self._attending[task] = None
                    task.add_done_callback(partial(self._close, connection))

    def _make_room(self) -> None:
        if len(self._attending) >= self._most:
            oldest = next(iter(self._attending))
            del self._attending[oldest]
            oldest.cancel()
            self._sparing.warning("many", "the oldest connection to fd.sock was closed", open=self._most)

    def _close(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        # Not before its task has ended, which takes the descriptor out of the loop: it is another's soon.
        self._attending.pop(task, None)
        connection.close()

    async def _attend(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(self._timeout):
                await _readable(connection)
                answer = self._answer(connection)
                if answer is not None:
                    await self._send(connection, answer)
        except TimeoutError:
            self._sparing.warning("silent", "a connection to fd.sock said nothing", seconds=self._timeout)
        except OSError as error:
            self._sparing.warning("broke", "a connection to fd.sock broke", error=str(error))
        except Exception as error:  # noqa: BLE001, memory is short, say: others are served
            self._sparing.warning("failed", "a connection to fd.sock was not served", error=repr(error))

    def _answer(self, connection: socket.socket) -> engine_pb2.PoolAnswer | None:
        data, fds, whole = _receive(connection)
        try:
            if not data and not fds:
                return None  # closed without a word
            return engine_pb2.PoolAnswer(pool_id=self._take(connection, data, fds, whole))
        except KvpushError as error:
            self._rejected(error)
            self._sparing.warning(error.reason.name, "offer refused", fault=str(error.fault()))
            return engine_pb2.PoolAnswer(fault=wire.fault_to_wire(error.fault()))
        finally:
            for fd in fds:
                os.close(fd)

    async def _send(self, connection: socket.socket, answer: engine_pb2.PoolAnswer) -> None:
        """Answers; who is not refused gets the lifeline too. Raises OSError."""
        lifeline = [] if answer.HasField("fault") else [self._lifeline]
        socket.send_fds(connection, [answer.SerializeToString()], lifeline)

    def _take(self, connection: socket.socket, data: bytes, fds: list[int], whole: bool) -> bytes:
        """The pool's id, or nothing for a scheduler. What the desk took is removed from `fds`."""
        if not whole:
            raise Invalid(f"an offer has at most {_MAX_OFFER} bytes and {_MAX_FDS} descriptors")
        try:
            offer = engine_pb2.PoolOffer.FromString(data)
        except DecodeError:
            raise Invalid("the datagram is not a PoolOffer") from None
        session = self._bearer(offer.token)
        if session is None:
            raise Forbidden("the token is not that of an open session")
        if session.offered:
            raise Invalid("a session makes one offer: reconnect to make another")
        if session.identity.role is Role.SCHEDULER:
            if fds or offer.pool_bytes:
                raise Invalid("a scheduler has no pool to offer")
            session.offered = True
            return b""
        if len(fds) != 1:
            raise BadMemory(f"a worker's offer carries one descriptor, and this one {len(fds)}")
        if not offer.pool_bytes:
            raise BadMemory("the offer says that the pool has 0 bytes")
        session.offered = True
        pool_id = self._desk.offer(session, fds[0], offer.pool_bytes, _uid(connection))
        fds.clear()
        return pool_id


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    data, ancillary, flags, _ = connection.recvmsg(
        _MAX_OFFER, socket.CMSG_SPACE(_MAX_FDS * _INT), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(array.array("i", payload[: len(payload) - len(payload) % _INT]))
    return data, fds, not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def _uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(credentials)[1]
    return uid


async def _readable(sock: socket.socket) -> None:
    # The loop's own sock_recv knows no ancillary data.
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    fd = sock.fileno()
    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)
