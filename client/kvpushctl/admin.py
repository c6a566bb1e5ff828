# SPDX-License-Identifier: Apache-2.0
"""The operator's connection to a kvpushd: admin.sock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvpush_client._proto import admin_pb2, admin_pb2_grpc
from kvpush_client.door import obstacle
from kvpushctl.errors import CommandError, DaemonUnreachable

SOCKET = "admin.sock"
PAGE_SIZE = 1000
DEADLINE_SECONDS = 5.0

Message = TypeVar("Message")


class Admin:
    """Asks one daemon. Lists are always fetched whole.

    Every call raises DaemonUnreachable if nobody answers, CommandError if the daemon refuses.
    """

    def __init__(self, stub: admin_pb2_grpc.AdminServiceStub, socket: Path) -> None:
        self._stub = stub
        self._socket = socket

    def status(self) -> admin_pb2.GetStatusResponse:
        """One look at the node."""
        return self._call(self._stub.GetStatus, admin_pb2.GetStatusRequest())

    def engines(self) -> list[admin_pb2.Engine]:
        """Engines, by id."""
        ask = admin_pb2.ListEnginesRequest
        return list(self._all(self._stub.ListEngines, lambda page: ask(page=page), "engines"))

    def reservations(self, engine_id: str = "") -> list[admin_pb2.Half]:
        """Receiver halves, oldest first; of one engine, or of all."""

        def ask(page: admin_pb2.Page) -> admin_pb2.ListReservationsRequest:
            return admin_pb2.ListReservationsRequest(page=page, engine_id=engine_id)

        return list(self._all(self._stub.ListReservations, ask, "reservations"))

    def handoffs(self, engine_id: str = "") -> list[admin_pb2.Half]:
        """Sender halves, oldest first; of one engine, or of all."""

        def ask(page: admin_pb2.Page) -> admin_pb2.ListHandoffsRequest:
            return admin_pb2.ListHandoffsRequest(page=page, engine_id=engine_id)

        return list(self._all(self._stub.ListHandoffs, ask, "handoffs"))

    def transfers(self, transfer_id: str = "", *, live_only: bool = False) -> list[admin_pb2.Transfer]:
        """Transfers in flight, then those that ended, newest first."""

        def ask(page: admin_pb2.Page) -> admin_pb2.ListTransfersRequest:
            return admin_pb2.ListTransfersRequest(page=page, transfer_id=transfer_id, live_only=live_only)

        return list(self._all(self._stub.ListTransfers, ask, "transfers"))

    def peers(self) -> list[admin_pb2.Peer]:
        """Links to other nodes, by address."""
        ask = admin_pb2.ListPeersRequest
        return list(self._all(self._stub.ListPeers, lambda page: ask(page=page), "peers"))

    def drain(self) -> admin_pb2.Held:
        """Refuses new work from now on; what is still held."""
        return self._call(self._stub.Drain, admin_pb2.DrainRequest()).held

    def _all(
        self, method: Callable[..., Any], ask: Callable[[admin_pb2.Page], Any], field: str
    ) -> Iterator[Any]:
        token = ""
        while True:
            answer = self._call(method, ask(admin_pb2.Page(size=PAGE_SIZE, token=token)))
            yield from getattr(answer, field)
            if not answer.next_page_token:
                return
            token = answer.next_page_token

    def _call(self, method: Callable[..., Message], request: object) -> Message:
        try:
            return method(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            raise _translated(error, self._socket) from None


@contextmanager
def connect(runtime_dir: Path) -> Iterator[Admin]:
    """The daemon whose sockets are in `runtime_dir`.

    Raises DaemonUnreachable at once where there is no socket, or where this user may not open it.
    """
    socket = runtime_dir / SOCKET
    start = "start kvpushd (systemctl start kvpushd), or name its directory with --runtime-dir or "
    why = obstacle(socket, f"{start}KVPUSHD_RUNTIME_DIR")
    if why is not None:
        raise DaemonUnreachable(why)
    with grpc.insecure_channel(f"unix:{socket.absolute()}") as channel:
        yield Admin(admin_pb2_grpc.AdminServiceStub(channel), socket)


def _translated(error: grpc.RpcError, socket: Path) -> CommandError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return DaemonUnreachable(f"nobody answers on {socket}: start kvpushd (systemctl start kvpushd)")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnreachable(
            f"no answer on {socket} within {DEADLINE_SECONDS:g} s: see its log (journalctl -u kvpushd)"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CommandError("the daemon is older than this kvpushctl and does not know this call: upgrade it")
    return CommandError(f"kvpushd refused: {code.name.lower()}: {details}")
