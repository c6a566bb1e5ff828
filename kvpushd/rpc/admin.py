# SPDX-License-Identifier: Apache-2.0
"""The gRPC service of kvpushctl: looks at the node through an `AdminView`, page by page."""

from __future__ import annotations

import base64
import binascii
import bisect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from kvpush_client._proto import admin_pb2, admin_pb2_grpc
from kvpushd.errors import Invalid, KvpushError
from kvpushd.rpc import sockets, status
from kvpushd.rpc.file import File

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000

Message = TypeVar("Message")
# Where an item stands in its list. Equal types at equal places, so that keys compare.
Key = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Row(Generic[Message]):
    """One item of a list, and its place: keys grow along a list, and an item keeps its key."""

    key: Key
    message: Message


class AdminView(Protocol):
    """The node, as its operator sees it. Each list is whole, and in the order of its rows' keys."""

    def status(self) -> admin_pb2.GetStatusResponse:
        """One look at the whole node."""

    def engines(self) -> Sequence[Row[admin_pb2.Engine]]:
        """By engine_id."""

    def reservations(self, engine_id: str) -> Sequence[Row[admin_pb2.Half]]:
        """Oldest first; of one engine unless `engine_id` is empty."""

    def handoffs(self, engine_id: str) -> Sequence[Row[admin_pb2.Half]]:
        """Oldest first; of one engine unless `engine_id` is empty."""

    def transfers(self, transfer_id: str, live_only: bool) -> Sequence[Row[admin_pb2.Transfer]]:
        """In flight, then those that ended, newest first; of one unless `transfer_id` is empty."""

    def peers(self) -> Sequence[Row[admin_pb2.Peer]]:
        """By address."""

    def drain(self) -> admin_pb2.Held:
        """Takes no new work from now on; says what is still held. Again and again is fine."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Translates and checks. `rejected` hears of each call that was refused."""

    def __init__(self, view: AdminView, rejected: Callable[[KvpushError], None]) -> None:
        self._view = view
        self.rejected = rejected

    async def GetStatus(  # noqa: N802, as the proto has it
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        """As the proto says."""
        return self._view.status()

    async def ListEngines(  # noqa: N802, as the proto has it
        self, request: admin_pb2.ListEnginesRequest, context: Any
    ) -> admin_pb2.ListEnginesResponse:
        """As the proto says."""
        items, token = await self._page(context, request.page, "engines", self._view.engines)
        return admin_pb2.ListEnginesResponse(engines=items, next_page_token=token)

    async def ListReservations(  # noqa: N802, as the proto has it
        self, request: admin_pb2.ListReservationsRequest, context: Any
    ) -> admin_pb2.ListReservationsResponse:
        """As the proto says."""
        engine_id = request.engine_id
        items, token = await self._page(
            context, request.page, f"reservations {engine_id}", lambda: self._view.reservations(engine_id)
        )
        return admin_pb2.ListReservationsResponse(reservations=items, next_page_token=token)

    async def ListHandoffs(  # noqa: N802, as the proto has it
        self, request: admin_pb2.ListHandoffsRequest, context: Any
    ) -> admin_pb2.ListHandoffsResponse:
        """As the proto says."""
        engine_id = request.engine_id
        items, token = await self._page(
            context, request.page, f"handoffs {engine_id}", lambda: self._view.handoffs(engine_id)
        )
        return admin_pb2.ListHandoffsResponse(handoffs=items, next_page_token=token)

    async def ListTransfers(  # noqa: N802, as the proto has it
        self, request: admin_pb2.ListTransfersRequest, context: Any
    ) -> admin_pb2.ListTransfersResponse:
        """As the proto says."""
        wanted, live_only = request.transfer_id.lower(), request.live_only
        if wanted and not re.fullmatch(r"[0-9a-f]{32}", wanted):
            await self._refuse(context, Invalid(f"transfer_id is {wanted!r}: expected 32 hex digits"))
        items, token = await self._page(
            context,
            request.page,
            f"transfers {wanted} {live_only}",
            lambda: self._view.transfers(wanted, live_only),
        )
        return admin_pb2.ListTransfersResponse(transfers=items, next_page_token=token)

    async def ListPeers(  # noqa: N802, as the proto has it
        self, request: admin_pb2.ListPeersRequest, context: Any
    ) -> admin_pb2.ListPeersResponse:
        """As the proto says."""
        items, token = await self._page(context, request.page, "peers", self._view.peers)
        return admin_pb2.ListPeersResponse(peers=items, next_page_token=token)

    async def Drain(  # noqa: N802, as the proto has it
        self, request: admin_pb2.DrainRequest, context: Any
    ) -> admin_pb2.DrainResponse:
        """As the proto says."""
        return admin_pb2.DrainResponse(held=self._view.drain())

    async def _page(
        self, context: Any, page: admin_pb2.Page, of: str, rows: Callable[[], Sequence[Row[Message]]]
    ) -> tuple[list[Message], str]:
        try:
            after = _read_token(page.token, of) if page.token else None
            return cut(rows(), min(page.size or DEFAULT_PAGE, LARGEST_PAGE), after, of)
        except KvpushError as error:
            await self._refuse(context, error)

    async def _refuse(self, context: Any, error: KvpushError) -> NoReturn:
        self.rejected(error)
        await status.abort(context, error)


def cut(rows: Sequence[Row[Message]], size: int, after: Key | None, of: str) -> tuple[list[Message], str]:
    """The `size` items whose keys follow `after`, and the token of the next page.

    What was added or has gone since the page before is seen or not by its place; nothing comes twice, and
    nothing that stays is left out. Raises Invalid if the key is of another list.
    """
    try:
        start = 0 if after is None else bisect.bisect_right(rows, after, key=lambda row: row.key)
    except TypeError:
        raise Invalid("page.token: not one of this list; begin again with an empty one") from None
    taken = rows[start : start + size]
    more = start + size < len(rows)
    return [row.message for row in taken], _token(taken[-1].key, of) if more else ""


def _token(key: Key, of: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([of, *key]).encode()).decode()


def _read_token(token: str, of: str) -> Key:
    try:
        found = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        found = None
    if (
        not isinstance(found, list)
        or found[:1] != [of]
        or not all(type(part) in (int, str) for part in found)
    ):
        raise Invalid("page.token: not one of this list; begin again with an empty one")
    return tuple(found[1:])


async def serve_admin(
    service: AdminService,
    health_service: health_aio.HealthServicer,
    path: Path,
    *,
    mode: int = sockets.MODE,
    message_bytes: int = 16 << 20,
) -> tuple[grpc.aio.Server, File]:
    """Serves the admin socket with health and reflection; returns the running server and the socket's file.
    Keep both: remove the file, then stop the server.

    Raises ConfigError if the socket can't be bound.
    """
    server = grpc.aio.server(
        interceptors=(status.Decoding(service.rejected),),
        maximum_concurrent_rpcs=1024,
        options=(
            ("grpc.max_receive_message_length", message_bytes),
            ("grpc.max_send_message_length", message_bytes),
        ),
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    file = sockets.add_port(server, path, mode=mode)
    await server.start()
    return server, file
