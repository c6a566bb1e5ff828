# SPDX-License-Identifier: Apache-2.0
"""Whatever can be said has its row."""

from __future__ import annotations

import pytest

from kvpush_client._proto import engine_pb2, peer_pb2
from tests.access.access_kit import FILES, TABLE, WORKERS, kinds
from tests.access.test_strangers import METHODS, PATHS


@pytest.mark.parametrize("message", TABLE, ids=lambda message: message.__name__)
def test_every_kind_of_item_has_a_row(message: type) -> None:
    assert kinds(message) == set(TABLE[message])


def test_every_message_of_items_is_in_the_table() -> None:
    repeated = {
        field.message_type.name
        for file in FILES
        for stream in file.DESCRIPTOR.message_types_by_name.values()
        for field in stream.fields
        if stream.name.endswith(("SessionRequest", "LinkRequest", "LinkResponse")) and field.name == "items"
    }
    assert repeated == {message.__name__ for message in TABLE}


def test_a_stream_holds_a_hello_and_numbered_items_and_nothing_else() -> None:
    for stream in (engine_pb2.SessionRequest, peer_pb2.LinkRequest, peer_pb2.LinkResponse):
        assert set(stream.DESCRIPTOR.fields_by_name) == {"hello", "items", "first"}, stream
    assert set(engine_pb2.PoolOffer.DESCRIPTOR.fields_by_name) == {"token", "pool_bytes"}


def test_every_rpc_and_every_path_of_http_has_a_row() -> None:
    of_files = {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(METHODS) == of_files
    assert PATHS == ("/metrics", "/healthz", "/readyz")


def test_items_of_workers_are_items() -> None:
    assert kinds(engine_pb2.EngineItem) > WORKERS
