# SPDX-License-Identifier: Apache-2.0
"""How time passes for a ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvpushd.core.events import DrainBegan, Event, Tick
from kvpushd.core.words import Instant
from kvpushd.node.hub import Hub


class Ledger:
    """Holds something or nothing, and counts its ticks."""

    def __init__(self) -> None:
        self.idle = True
        self.ticks = 0
        self.ticked = asyncio.Event()

    def handle(self, event: Event, now: Instant) -> Sequence[Any]:
        if isinstance(event, Tick):
            self.ticks += 1
            self.ticked.set()
        return ()


def test_a_ledger_that_comes_to_hold_something_hears_of_time_at_once_again() -> None:
    """A lease must not end late because nothing was held as it began."""

    async def scene() -> None:
        ledger = Ledger()
        hub = Hub(ledger)  # type: ignore[arg-type]
        ticking = asyncio.ensure_future(hub.tick(every=0.001, idle=3600.0))
        await asyncio.sleep(0.05)
        assert ledger.ticks == 0
        ledger.idle = False
        hub.feed(DrainBegan())
        async with asyncio.timeout(20):
            await ledger.ticked.wait()
        ledger.idle = True
        hub.feed(DrainBegan())
        await asyncio.sleep(0.05)
        seen = ledger.ticks
        await asyncio.sleep(0.05)
        assert ledger.ticks == seen
        ticking.cancel()

    asyncio.run(scene())
