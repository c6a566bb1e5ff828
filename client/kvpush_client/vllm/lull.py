# SPDX-License-Identifier: Apache-2.0
"""Steps in which vLLM has nothing to compute: all that it has waits for KV, or for blocks to come back."""

from __future__ import annotations

from typing import Protocol

_PATIENCE_S = 0.005
"""How long such a step waits for the daemon's word. An empty step costs about 0.3 ms of CPU, and vLLM makes
one each 1.3 ms. Longer would be felt by a request that comes meanwhile: vLLM takes it in between steps."""


class Desk(Protocol):
    """What is used of a session."""

    def wait(self, timeout: float) -> None:
        """Until it has something to say."""


class Lull:
    """Makes empty steps fewer, without making what ends them later: the daemon's word ends the wait.

    `batches`: how many vLLM has in flight at most; only when none is left does a wait delay nothing.
    `lockstep`: other ranks compute together with this one (data parallel), and would wait with it.
    """

    def __init__(self, desk: Desk, *, batches: int, lockstep: bool) -> None:
        self._desk = desk
        self._batches = batches
        self._lockstep = lockstep
        self._empty = 0

    def step(self, requests: int, news: bool) -> bool:
        """A step of so many requests has been scheduled, and there is news to tell workers in it, or none.

        Returns whether it waited, so that there may be news now.
        """
        self._empty = 0 if requests else self._empty + 1
        if news or self._lockstep or self._empty < self._batches:
            return False
        self._desk.wait(_PATIENCE_S)
        return True
