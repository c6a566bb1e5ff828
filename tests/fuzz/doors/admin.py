# SPDX-License-Identifier: Apache-2.0
"""admin.sock."""

from __future__ import annotations

import grpc
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from kvpush_client._proto import admin_pb2
from testing.node import DEADLINE, Node
from tests.fuzz.doors.door import Saying, check
from tests.fuzz.messages import saying


class AdminDoor:
    """admin.sock: each of its methods."""

    name = "admin"

    def __init__(self, node: Node) -> None:
        self._target = f"unix:{node.runtime_dir}/admin.sock"
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        self._methods = [m for m in service.methods if m.name != "Drain"]  # which would end the test

    def sayings(self) -> st.SearchStrategy[Saying]:
        def said(index: int) -> st.SearchStrategy[Saying]:
            method = self._methods[index]
            return saying(GetMessageClass(method.input_type)).map(lambda data: [method.name.encode(), data])

        return st.integers(0, len(self._methods) - 1).flatmap(said)

    def say(self, said: Saying) -> None:
        """The first message names the method."""
        name, data = said
        with grpc.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(f"/kvpush.v1.AdminService/{name.decode()}")
            try:
                call(data, timeout=DEADLINE)
            except grpc.RpcError as error:
                _refused(error)


def _refused(error: grpc.RpcError) -> None:
    """The caller is told that it was wrong, and not that something here was."""
    check(error)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
