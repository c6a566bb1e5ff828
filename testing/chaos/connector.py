# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector of engines on the stage. Only they import it, as it imports vLLM."""

from __future__ import annotations

from testing.chaos.ears import new_session
from testing.faults.connector import FaultyConnector


class ListeningConnector(FaultyConnector):
    """FaultyConnector over listening sessions."""

    _new_session = staticmethod(new_session)
