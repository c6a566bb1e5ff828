# SPDX-License-Identifier: Apache-2.0
"""Where a decode engine finds the KV of a prefill engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What vLLM adds to the engine_id that it was given, for each engine of a data-parallel server.
_RANK = re.compile(r"_dp\d+\Z")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A prefill engine's id, its daemon's host and port, and how many ranks it is split over (if known)."""

    engine_id: str
    host: str
    port: int
    tp_size: int | None = None

    @property
    def base(self) -> str:
        """The engine_id that the server was started with."""
        return _RANK.sub("", self.engine_id)

    @property
    def parallel(self) -> bool:
        """The engine is one of a data-parallel server's."""
        return self.base != self.engine_id

    @classmethod
    def from_params(cls, params: object) -> Coordinates | None:
        """What a prefill engine's kv_transfer_params say about itself; None where they say too little.

        Only what is true of the engine is taken: what they say about the one request (its id, its blocks)
        would be wrong for the next one.
        """
        if not isinstance(params, Mapping):
            return None
        engine_id, host, port = (params.get(f"remote_{word}") for word in ("engine_id", "host", "port"))
        if not isinstance(engine_id, str) or not isinstance(host, str) or not engine_id or not host:
            return None
        try:
            number = int(port)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return None
        if not 0 < number < 65536:
            return None
        tp_size = params.get("tp_size")
        return cls(engine_id, host, number, tp_size if isinstance(tp_size, int) else None)

    def to_params(self) -> dict[str, Any]:
        """The same as the part of a decode engine's kv_transfer_params that names the prefill engine."""
        params: dict[str, Any] = {
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
        }
        if self.tp_size is not None:
            params["tp_size"] = self.tp_size
        return params
