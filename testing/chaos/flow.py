# SPDX-License-Identifier: Apache-2.0
"""Transfers from P's node to a third one, one after the other, and how many bytes a second they carry."""

from __future__ import annotations

import threading
import time
from typing import Any

from kvpush_client.events import ReservationEnded
from testing.chaos.stage import Stage, wait_for
from testing.rank import BLOCK, Engine, new_key

_BLOCKS = 8
_CELL = 512
_UNDER_WAY = 3
_WARM_UP = 90
FLOWING = 30.0
"""Seconds within which the first transfers must have landed."""


class Flow:
    """Engines by hand on both nodes. Use it as a context; `rate` looks at it."""

    def __init__(self, stage: Stage) -> None:
        # Eight times as many blocks as are handed off, since unmatched handoffs may hold a part only.
        blocks = 8 * _BLOCKS * _UNDER_WAY
        self._sender = Engine(stage.nodes["p"], "flow-p", blocks, cell=_CELL)
        self._receiver = Engine(stage.nodes["e"], "flow-e", blocks, cell=_CELL)
        self._bytes_each = sum(rank.bytes.nbytes for rank in self._sender.ranks) * _BLOCKS // blocks
        self._landed = 0
        self._failed: list[Any] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow")

    def __enter__(self) -> Flow:
        self._sender.start()
        self._receiver.start()
        self._thread.start()
        try:
            # The first ones meet connections that are being made, and pages that nobody has touched.
            wait_for("transfers to a third node flow", lambda: self._landed >= _WARM_UP, FLOWING)
        except TimeoutError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def rate(self, seconds: float) -> float:
        """Bytes a second that land from now on. Raises AssertionError where one of the transfers failed."""
        before, began = self._landed, time.monotonic()
        self._over.wait(seconds)
        rate = (self._landed - before) * self._bytes_each / (time.monotonic() - began)
        assert not self._failed, f"a transfer to a third node ended with {self._failed[0]}"
        assert rate, f"no transfer to a third node landed in {seconds:g} s"
        return rate

    def _run(self) -> None:
        try:
            self._flow()
        except AssertionError as error:  # none came in time; `rate` says so
            self._failed.append(error)

    def _flow(self) -> None:
        keys = [self._begin(number) for number in range(_UNDER_WAY)]
        while not self._over.is_set():
            end = self._receiver.wait_for(ReservationEnded)
            if end.fault is not None:
                self._failed.append(end.fault)
                return
            number = keys.index(end.key)
            self._landed += 1
            keys[number] = self._begin(number)
        while any(keys):
            end = self._receiver.wait_for(ReservationEnded)
            keys[keys.index(end.key)] = None

    def _begin(self, number: int) -> Any:
        key = new_key()
        ids = range(number * _BLOCKS, (number + 1) * _BLOCKS)
        self._receiver.reserve(key, self._sender, ids, _BLOCKS * BLOCK)
        self._sender.send(key, ids, _BLOCKS * BLOCK)
        return key
