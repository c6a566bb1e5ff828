# SPDX-License-Identifier: Apache-2.0
"""The worker side of the connector: a rank's pool, what is final in it, and what has arrived in it.

All on the worker's own thread. On a CPU a layer is done when its call returns, so what is handed off is final
by then; nothing waits and nothing polls inside the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import Logger
from typing import Protocol

from kvpush_client.events import (
    Disconnected,
    Event,
    Fault,
    Reason,
    Rejected,
    ReservationEnded,
    Side,
    TransferKey,
)
from kvpush_client.vllm.metadata import Progress, Step


class Desk(Protocol):
    """What is used of a session."""

    @property
    def ready(self) -> bool:
        """The daemon is there."""

    def poll(self) -> list[Event]:
        """What it has said."""

    def advance(
        self, key: TransferKey, positions: int, *, first_layer: int = 0, end_layer: int | None = None
    ) -> None:
        """This much is final."""

    def close(self) -> None:
        """The worker ends."""


@dataclass(slots=True)
class Results:
    """Requests whose wait is over; what failed is in both."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """One rank's steps. `layers` are its layout's layers by name, in the order of the forward pass.

    A forward pass is handed off in `layer_groups` parts. The last is said after the pass, for all layers,
    which covers whatever vLLM did not name on the way (state layers, compiled graphs).
    """

    def __init__(self, desk: Desk, layers: Sequence[str], layer_groups: int, log: Logger) -> None:
        self._desk = desk
        self._log = log
        self._depth = {name: index for index, name in enumerate(layers)}
        parts = min(layer_groups, len(layers))
        self._ends = {len(layers) * part // parts for part in range(1, parts)}
        self._waiting: dict[TransferKey, str] = {}
        self._results = Results()
        self._progress: list[Progress] = []
        self._done = self._said = 0
        self._handled: BaseException | None = None

    def begin(self, step: Step) -> None:
        """A step's metadata is bound; its forward has not begun."""
        # Metadata is cleared in a `finally`: then, only a new exception says that the forward failed.
        self._handled = sys.exception()
        self._progress = step.progress
        self._done = self._said = 0
        heard = self._desk.poll()
        self._take(heard)
        for key, request_id in step.waits:
            self._waiting[key] = request_id
        # Who begins to wait in this step may have an end among them. That the daemon was away, which an idle
        # engine hears only now, is none: it has reserved since that is back.
        for event in heard:
            self._hear(event)
        for key, fault in step.ends:
            self._end(key, fault)
        if step.waits and not self._desk.ready:
            self._fail_all("the daemon is away")
        for progress in step.progress:
            if progress.before:
                self._desk.advance(progress.key, progress.before)

    def layer_done(self, name: str) -> None:
        """The forward of one layer has returned."""
        if not self._progress or self._depth.get(name) != self._done:
            return
        self._done += 1
        if self._done in self._ends:
            for progress in self._progress:
                self._desk.advance(progress.key, progress.after, first_layer=self._said, end_layer=self._done)
            self._said = self._done

    def forward_done(self) -> None:
        """The forward has returned, if there was one; called also while an exception leaves it."""
        progress, self._progress = self._progress, []
        if sys.exception() is not self._handled:
            return
        for moved in progress:
            self._desk.advance(moved.key, moved.after)

    def results(self) -> Results:
        """Whose wait is over since the last call; each request once per wait."""
        self._take(self._desk.poll())
        results = self._results
        if results.finished:
            self._results = Results()
        return results

    def _take(self, events: Sequence[Event]) -> None:
        """What has happened to those that wait already, in its order."""
        for event in events:
            if isinstance(event, Disconnected):
                self._fail_all(event.detail)
            self._hear(event)

    def _hear(self, event: Event) -> None:
        match event:
            case ReservationEnded(key=key, fault=fault):
                self._end(key, fault)
            case Rejected(key=key, side=Side.RECEIVER, fault=fault):
                self._end(key, fault)

    def _fail_all(self, detail: str) -> None:
        for key in list(self._waiting):
            self._end(key, Fault(Reason.PEER_UNREACHABLE, detail))

    def _end(self, key: TransferKey, fault: Fault | None) -> None:
        # An end that comes before its wait is said again by the scheduler, with or after the wait.
        request_id = self._waiting.pop(key, None)
        if request_id is None:
            return
        self._results.finished.add(request_id)
        if fault is not None:
            self._results.failed.add(request_id)

    def close(self) -> None:
        """The worker ends."""
        self._desk.close()
