# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`, name `kvpush`)."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvpush_client.vllm.cpu import allow_amx

NAME = "KvpushConnector"
MODULE = "kvpush_client.vllm.connector"


def register() -> None:
    """Make the connector known by name, and the CPU's tiles allowed. vLLM may call it any number of times."""
    allow_amx()
    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
