# SPDX-License-Identifier: Apache-2.0
"""When a writer that waits for something to write is to wake."""

from __future__ import annotations

import asyncio

HOLD = 0.02
"""Seconds that what is in no hurry may wait for company. A message costs either side some 0.2 ms of CPU,
whatever is in it; and a transfer of a few blocks is over within this, on a busy machine too."""


class Nudge:
    """Wakes one waiter: at once, or soon. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> None:
        """Wakes the waiter at once."""
        self._event.set()

    def soon(self) -> None:
        """Wakes the waiter within HOLD seconds."""
        if self._timer is None and not self._event.is_set():
            self._timer = asyncio.get_running_loop().call_later(HOLD, self._event.set)

    def done(self) -> None:
        """The waiter has taken all that there was."""
        self._event.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self) -> None:
        """Returns as soon as it was woken, at once if that was before; until `done`."""
        await self._event.wait()
