# SPDX-License-Identifier: Apache-2.0
"""The admin socket: real gRPC over a unix socket."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpush_client._proto import admin_pb2, admin_pb2_grpc
from kvpush_client.events import Reason
from kvpushd.errors import ConfigError, KvpushError
from kvpushd.rpc.admin import AdminService, Row, serve_admin
from tests.rpc.peer_kit import in_loop


@dataclass
class Node:
    """An AdminView of lists that a test fills."""

    engine_rows: list[Row[admin_pb2.Engine]] = field(default_factory=list)
    half_rows: list[Row[admin_pb2.Half]] = field(default_factory=list)
    transfer_rows: list[Row[admin_pb2.Transfer]] = field(default_factory=list)
    drains: int = 0

    def status(self) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(node="a", ready=True)

    def engines(self) -> Sequence[Row[admin_pb2.Engine]]:
        return self.engine_rows

    def reservations(self, engine_id: str) -> Sequence[Row[admin_pb2.Half]]:
        return [row for row in self.half_rows if engine_id in ("", row.message.engine_id)]

    def handoffs(self, engine_id: str) -> Sequence[Row[admin_pb2.Half]]:
        return []

    def transfers(self, transfer_id: str, live_only: bool) -> Sequence[Row[admin_pb2.Transfer]]:
        return [row for row in self.transfer_rows if transfer_id in ("", row.message.half.transfer_id)]

    def peers(self) -> Sequence[Row[admin_pb2.Peer]]:
        return [Row(("10.0.0.2:7766", 0), admin_pb2.Peer(address="10.0.0.2:7766"))]

    def drain(self) -> admin_pb2.Held:
        self.drains += 1
        return admin_pb2.Held(reservations=3 - self.drains)


@dataclass
class Admin:
    """What a test talks to."""

    node: Node
    stub: Any
    channel: grpc.aio.Channel
    rejected: list[KvpushError]
    health: health_aio.HealthServicer


@asynccontextmanager
async def admin(folder: Path) -> AsyncIterator[Admin]:
    node, health = Node(), health_aio.HealthServicer()
    rejected: list[KvpushError] = []
    path = folder / "admin.sock"
    server, _ = await serve_admin(AdminService(node, rejected.append), health, path, mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield Admin(node, admin_pb2_grpc.AdminServiceStub(channel), channel, rejected, health)
    finally:
        await server.stop(None)


def engine(name: str) -> Row[admin_pb2.Engine]:
    return Row((name,), admin_pb2.Engine(engine_id=name))


def half(number: int, engine_id: str = "e") -> Row[admin_pb2.Half]:
    return Row((number,), admin_pb2.Half(transfer_id=f"{number:032x}", engine_id=engine_id))


async def reservation_pages(stub: Any, size: int, engine_id: str = "") -> list[list[int]]:
    pages, token = [], ""
    while True:
        page = admin_pb2.Page(size=size, token=token)
        answer = await stub.ListReservations(
            admin_pb2.ListReservationsRequest(page=page, engine_id=engine_id)
        )
        pages.append([int(found.transfer_id, 16) for found in answer.reservations])
        token = answer.next_page_token
        if not token:
            return pages


@in_loop
async def test_a_list_comes_in_pages_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        asked.node.half_rows = [half(number) for number in range(7)]
        assert await reservation_pages(asked.stub, 3) == [[0, 1, 2], [3, 4, 5], [6]]
        assert await reservation_pages(asked.stub, 7) == [[0, 1, 2, 3, 4, 5, 6]]
        asked.node.half_rows = []
        assert await reservation_pages(asked.stub, 3) == [[]]


@pytest.mark.parametrize(("asked_for", "given"), [(0, 100), (1000, 1000), (5000, 1000)])
@in_loop
async def test_a_page_has_a_size_by_default_and_at_most(tmp_path: Path, asked_for: int, given: int) -> None:
    async with admin(tmp_path) as asked:
        asked.node.half_rows = [half(number) for number in range(1200)]
        assert len((await reservation_pages(asked.stub, asked_for))[0]) == given


@in_loop
async def test_items_that_come_and_go_between_pages_neither_repeat_nor_hide_those_that_stay(
    tmp_path: Path,
) -> None:
    async with admin(tmp_path) as asked:
        asked.node.engine_rows = [engine(name) for name in ("b", "d", "f", "h")]
        first = await asked.stub.ListEngines(admin_pb2.ListEnginesRequest(page=admin_pb2.Page(size=2)))
        asked.node.engine_rows = [engine(name) for name in ("a", "b", "e", "f", "h")]
        page = admin_pb2.Page(size=9, token=first.next_page_token)
        rest = await asked.stub.ListEngines(admin_pb2.ListEnginesRequest(page=page))
        assert [found.engine_id for found in first.engines] == ["b", "d"]
        assert [found.engine_id for found in rest.engines] == ["e", "f", "h"]


@in_loop
async def test_lists_are_filtered_by_engine_and_by_transfer(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        asked.node.half_rows = [half(1, "x"), half(2, "y"), half(3, "x")]
        asked.node.transfer_rows = [Row((n,), admin_pb2.Transfer(half=half(n).message)) for n in range(3)]
        assert await reservation_pages(asked.stub, 9, "x") == [[1, 3]]
        request = admin_pb2.ListTransfersRequest(transfer_id=f"{2:032X}")
        assert len((await asked.stub.ListTransfers(request)).transfers) == 1


@pytest.mark.parametrize("token", ["x", "////", "bnVsbA==", "WyJlbmdpbmVzIiwgW11d", "WyJlbmdpbmVzIiwgMV0="])
@in_loop
async def test_a_token_of_nobodys_is_refused_and_counted(tmp_path: Path, token: str) -> None:
    async with admin(tmp_path) as asked:
        asked.node.engine_rows = [engine("a")]
        request = admin_pb2.ListEnginesRequest(page=admin_pb2.Page(token=token))
        with pytest.raises(grpc.aio.AioRpcError, match=r"page\.token") as refused:
            await asked.stub.ListEngines(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [error.reason for error in asked.rejected] == [Reason.INVALID]


@in_loop
async def test_a_token_of_another_filter_is_refused(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        asked.node.half_rows = [half(1, "x"), half(2, "x")]
        request = admin_pb2.ListReservationsRequest(engine_id="x", page=admin_pb2.Page(size=1))
        token = (await asked.stub.ListReservations(request)).next_page_token
        with pytest.raises(grpc.aio.AioRpcError, match=r"page\.token"):
            await asked.stub.ListReservations(
                admin_pb2.ListReservationsRequest(page=admin_pb2.Page(token=token))
            )


@in_loop
async def test_what_is_no_transfer_id_is_refused(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        with pytest.raises(grpc.aio.AioRpcError, match="32 hex digits"):
            await asked.stub.ListTransfers(admin_pb2.ListTransfersRequest(transfer_id="cmpl-1"))


@in_loop
async def test_draining_may_be_asked_for_again_and_says_what_is_left(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        left = [(await asked.stub.Drain(admin_pb2.DrainRequest())).held.reservations for _ in range(2)]
        assert left == [2, 1]


@in_loop
async def test_status_peers_and_handoffs_answer(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        assert (await asked.stub.GetStatus(admin_pb2.GetStatusRequest())).node == "a"
        assert len((await asked.stub.ListPeers(admin_pb2.ListPeersRequest())).peers) == 1
        assert not (await asked.stub.ListHandoffs(admin_pb2.ListHandoffsRequest())).handoffs


@in_loop
async def test_health_follows_the_daemon(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        stub: Any = health_pb2_grpc.HealthStub(asked.channel)
        request = health_pb2.HealthCheckRequest()
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await asked.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING


@in_loop
async def test_reflection_names_the_services_and_describes_their_messages(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(asked.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = {found.name for found in (await call.read()).list_services_response.service}
        assert {"kvpush.v1.AdminService", "grpc.health.v1.Health"} <= services
        await call.write(
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvpush.v1.AdminService")
        )
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()


@in_loop
async def test_a_second_daemon_does_not_take_the_socket_of_a_live_one(tmp_path: Path) -> None:
    async with admin(tmp_path) as asked:
        with pytest.raises(ConfigError):
            async with admin(tmp_path):
                pass
        assert (await asked.stub.GetStatus(admin_pb2.GetStatusRequest())).ready
