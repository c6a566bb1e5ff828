# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector of a test build.

    {"kv_connector": "FaultyConnector", "kv_connector_module_path": "testing.faults.connector", ...}

The engine's processes need Board.environment.
"""

from __future__ import annotations

import os
from typing import Any

from kvpush_client.items import Identity
from kvpush_client.session import Session
from kvpush_client.vllm.connector import KvpushConnector
from testing.faults.catalog import CLIENT
from testing.faults.points import Points
from testing.faults.session import FaultySession


def new_session(runtime_dir: Any, identity: Identity, *rest: Any, **named: Any) -> Session:
    """A faulty one. Raises KeyError where the process was given no board."""
    return FaultySession(Points.of_environment(CLIENT, os.environ), runtime_dir, identity, *rest, **named)


class FaultyConnector(KvpushConnector):
    """KvpushConnector over faulty sessions."""

    _new_session = staticmethod(new_session)
