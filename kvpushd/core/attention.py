# SPDX-License-Identifier: Apache-2.0
"""How eagerly movers look for bytes that come in."""

from __future__ import annotations

from enum import Enum


class Attention(Enum):
    """How soon bytes may come in: how eagerly a mover has to look for them."""

    IDLE = "idle"
    EXPECTING = "expecting"
    FILLING = "filling"
