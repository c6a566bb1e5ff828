# SPDX-License-Identifier: Apache-2.0
"""fd.sock from the engine's side: a pool's descriptor goes out, a lifeline comes back."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from kvpush_client import wire
from kvpush_client._proto import engine_pb2
from kvpush_client.errors import DaemonRefused, DaemonUnreachable
from kvpush_client.events import Reason

MAX_DATAGRAM = 1 << 16


def exchange(
    path: Path, token: bytes, pool: tuple[int, int] | None, *, timeout: float, wake: int
) -> tuple[bytes, int]:
    """Offers a pool (descriptor, bytes), or none; returns the pool's id and the lifeline's descriptor.

    The caller owns the lifeline. A readable `wake` (a descriptor) ends the wait, as the timeout does.

    Raises DaemonUnreachable or DaemonRefused.
    """
    fd, nbytes = pool if pool is not None else (-1, 0)
    offer = engine_pb2.PoolOffer(token=token, pool_bytes=nbytes).SerializeToString()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except BlockingIOError:
                raise OSError("more processes wait to be let in than it takes at a time") from None
            socket.send_fds(sock, [offer], [fd] if pool is not None else [])
            _await_readable(sock, wake, timeout)
            data, lifeline = _receive(sock)
    except OSError as error:
        raise DaemonUnreachable(f"{path}: {error}") from error
    try:
        answer = engine_pb2.PoolAnswer.FromString(data)
        if answer.HasField("fault"):
            fault = wire.fault_from_wire(answer.fault)
            if fault.reason is Reason.PEER_UNREACHABLE:  # no answer to the offer: the session has ended
                raise DaemonUnreachable(f"{path}: {fault.detail}")
            raise DaemonRefused(fault.reason, fault.detail)
        if lifeline is None:
            raise DaemonUnreachable(f"{path}: the answer carries no lifeline")
    except DecodeError as error:
        _close(lifeline)
        raise DaemonRefused(Reason.UNSUPPORTED, f"{path}: the answer is not a PoolAnswer: {error}") from error
    except BaseException:
        _close(lifeline)
        raise
    return answer.pool_id, lifeline


def _await_readable(sock: socket.socket, wake: int, timeout: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(wake, select.POLLIN)
    ready = dict(poll.poll(timeout * 1000))
    if wake in ready:
        raise InterruptedError("given up")
    if not ready:
        raise TimeoutError(f"no answer within {timeout:g} s")


def _receive(sock: socket.socket) -> tuple[bytes, int | None]:
    size = array.array("i").itemsize
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_DATAGRAM, socket.CMSG_SPACE(4 * size), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(array.array("i", payload[: len(payload) - len(payload) % size]))
    for extra in fds[1:]:
        os.close(extra)
    first = fds[0] if fds else None
    if first is None and flags & socket.MSG_CTRUNC:
        raise ConnectionError("too many open files: the lifeline did not arrive")
    # An answer without a pool's id is empty, and comes with a descriptor all the same.
    if first is None and not data:
        raise ConnectionError("closed without an answer")
    if flags & socket.MSG_TRUNC:
        _close(first)
        raise ConnectionError("the answer is cut short")
    return data, first


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class Lifeline:
    """The read end of a pipe that only a daemon and its movers can write to, and never do.

    Its end-of-file proves that all of them are dead. All sessions of a daemon share the pipe, so nothing
    is ever read from it and no flag of it is changed.
    """

    def __init__(self, fd: int) -> None:
        """Owns `fd` from now on. Raises DaemonUnreachable where this process may open no file more, or start
        no thread: when the watch is due, as the daemon has died, it is too late to be refused one."""
        self._fd = fd
        self._begin = threading.Event()
        self._ended: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="kvpush-lifeline", daemon=True)
        try:
            self._wake = os.eventfd(0)
        except OSError as error:
            os.close(fd)
            raise DaemonUnreachable(f"the daemon's lifeline can't be watched: {error}") from error
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake)
            os.close(fd)
            raise DaemonUnreachable(f"the daemon's lifeline can't be watched: {error}") from error

    def watch(self, ended: Callable[[], None]) -> None:
        """Calls `ended` from a thread of its own, once, when all writers are dead. At most one watch."""
        self._ended = ended
        self._begin.set()

    def _watch(self) -> None:
        self._begin.wait()
        if self._ended is None:
            return
        poll = select.poll()
        poll.register(self._fd, 0)  # an empty mask still reports POLLHUP, and never stray bytes
        poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll())
        if self._wake not in ready:
            self._ended()

    def close(self) -> None:
        """Ends the watch and closes the descriptor. Not for calling from `ended`."""
        os.eventfd_write(self._wake, 1)
        self._begin.set()
        self._thread.join()
        os.close(self._wake)
        os.close(self._fd)
