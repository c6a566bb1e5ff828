# SPDX-License-Identifier: Apache-2.0
"""What engines hear of their transfers' ends, and when: their sessions write it down, `Ears` reads it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from kvpush_client.events import Event, HandoffEnded, ReservationEnded
from kvpush_client.items import Identity
from kvpush_client.session import Session
from testing.faults.board import NODE, VARIABLE
from testing.faults.catalog import CLIENT
from testing.faults.points import Points
from testing.faults.session import FaultySession

HEARD = "heard.jsonl"
"""In the board's folder."""


class Ears:
    """Reads what was heard by the engines that got the board in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEARD
        self._read = 0
        """Bytes of it; it grows over a whole run, and is looked at every few milliseconds."""
        self._first: dict[tuple[str, str], float] = {}

    def heard(self, node: str, transfer_id: bytes) -> float | None:
        """When an engine on a node first heard of a transfer's end, CLOCK_MONOTONIC; None = not yet."""
        self._read_on()
        return self._first.get((node, transfer_id.hex()))

    def _read_on(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file if line.endswith(b"\n")]
        self._read += sum(len(line) for line in lines)
        for end in map(json.loads, lines):
            self._first.setdefault((end["node"], end["transfer_id"]), float(end["at"]))


class ListeningSession(FaultySession):
    """A session that writes down each end as its engine takes it."""

    def poll(self) -> list[Event]:
        """As the inner one."""
        events = super().poll()
        for event in events:
            if isinstance(event, ReservationEnded | HandoffEnded):
                _note(event)
        return events


def _note(event: ReservationEnded | HandoffEnded) -> None:
    fault = "" if event.fault is None else event.fault.reason.name
    end = {
        "at": time.monotonic(),
        "node": os.environ[NODE],
        "transfer_id": event.key.transfer_id.hex(),
        "what": type(event).__name__,
        "fault": fault,
    }
    # One write each, so that those of several engines do not mix.
    with (Path(os.environ[VARIABLE]) / HEARD).open("ab", buffering=0) as file:
        file.write(json.dumps(end).encode() + b"\n")


def new_session(runtime_dir: Any, identity: Identity, *rest: Any, **named: Any) -> Session:
    """A listening one. Raises KeyError where the process was given no board."""
    return ListeningSession(Points.of_environment(CLIENT, os.environ), runtime_dir, identity, *rest, **named)
