# SPDX-License-Identifier: Apache-2.0
"""A real gRPC server on a real admin.sock, with known content and short pages."""

# gRPC names a servicer's methods as the proto does.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvpush_client._proto import admin_pb2, admin_pb2_grpc

PAGE = 2


@dataclass
class Content:
    """What the node has."""

    status: admin_pb2.GetStatusResponse = field(default_factory=admin_pb2.GetStatusResponse)
    engines: list[admin_pb2.Engine] = field(default_factory=list)
    reservations: list[admin_pb2.Half] = field(default_factory=list)
    handoffs: list[admin_pb2.Half] = field(default_factory=list)
    transfers: list[admin_pb2.Transfer] = field(default_factory=list)
    peers: list[admin_pb2.Peer] = field(default_factory=list)
    left: list[admin_pb2.Held] = field(default_factory=list)
    """What each Drain reports, one after the other; the last one again and again."""


class AdminServer(admin_pb2_grpc.AdminServiceServicer):
    """Answers from its content, never more than `PAGE` items at a time."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.drains = 0

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.GetStatusResponse:
        return self.content.status

    def ListEngines(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.ListEnginesResponse:
        part, token = _part(self.content.engines, request.page)
        return admin_pb2.ListEnginesResponse(engines=part, next_page_token=token)

    def ListReservations(
        self, request: Any, context: grpc.ServicerContext
    ) -> admin_pb2.ListReservationsResponse:
        part, token = _part(_of(self.content.reservations, request.engine_id), request.page)
        return admin_pb2.ListReservationsResponse(reservations=part, next_page_token=token)

    def ListHandoffs(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.ListHandoffsResponse:
        part, token = _part(_of(self.content.handoffs, request.engine_id), request.page)
        return admin_pb2.ListHandoffsResponse(handoffs=part, next_page_token=token)

    def ListTransfers(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.ListTransfersResponse:
        found = [
            one
            for one in self.content.transfers
            if request.transfer_id in ("", one.half.transfer_id)
            and not (request.live_only and one.half.phase == admin_pb2.PHASE_ENDED)
        ]
        part, token = _part(found, request.page)
        return admin_pb2.ListTransfersResponse(transfers=part, next_page_token=token)

    def ListPeers(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.ListPeersResponse:
        part, token = _part(self.content.peers, request.page)
        return admin_pb2.ListPeersResponse(peers=part, next_page_token=token)

    def Drain(self, request: Any, context: grpc.ServicerContext) -> admin_pb2.DrainResponse:
        left = self.content.left[min(self.drains, len(self.content.left) - 1)]
        self.drains += 1
        return admin_pb2.DrainResponse(held=left)


@contextmanager
def serve(servicer: admin_pb2_grpc.AdminServiceServicer, runtime_dir: Path) -> Iterator[None]:
    """On `runtime_dir`/admin.sock until the context ends."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{runtime_dir / 'admin.sock'}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def _of(halves: Sequence[admin_pb2.Half], engine_id: str) -> list[admin_pb2.Half]:
    return [one for one in halves if engine_id in ("", one.engine_id)]


def _part(items: Sequence[Any], page: admin_pb2.Page) -> tuple[Sequence[Any], str]:
    start = int(page.token or 0)
    end = start + min(PAGE, page.size)
    return items[start:end], str(end) if end < len(items) else ""
