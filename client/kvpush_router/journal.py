# SPDX-License-Identifier: Apache-2.0
"""One line of JSON per request, on stderr."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime


@dataclass(slots=True)
class Entry:
    """What became of one request. Times are milliseconds since it came."""

    path: str
    request_id: str
    transfer_id: str = ""
    mode: str = "alone"
    """`both` (legs at once), `sequential` (prefill first, to learn coordinates), `alone` (decode only)."""
    why: str = ""
    """Why the mode is not `both`, or what went wrong."""
    prefill: str = ""
    rank: int | None = None
    """Which engine of a data-parallel prefill server was asked for."""
    prefill_status: int | None = None
    decode: str = ""
    status: int | None = None
    """What the client got; None if it left before."""
    first_byte_ms: float | None = None
    total_ms: float | None = None


class Journal:
    """Writes entries through a logger."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def write(self, entry: Entry) -> None:
        """One line; what is empty is left out."""
        said = {key: value for key, value in asdict(entry).items() if value not in ("", None)}
        self.note("request", **said)

    def note(self, event: str, **facts: object) -> None:
        """A line that is not about one request."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts}
        self._logger.info(json.dumps(line, separators=(",", ":")))


def stderr_journal() -> Journal:
    """The journal of a process."""
    logger = logging.getLogger("kvpush_router")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return Journal(logger)
