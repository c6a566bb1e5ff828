# SPDX-License-Identifier: Apache-2.0
"""Events to the ledger, and its instructions to whoever carries them out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from kvpushd.core.events import Event, Tick
from kvpushd.core.instructions import Instruction
from kvpushd.core.ledger import Ledger
from kvpushd.core.words import Instant

I = TypeVar("I")  # noqa: E741, the type of an instruction


def now() -> Instant:
    """The node's clock: engines and movers stamp with the same."""
    return time.monotonic_ns()


class Hub:
    """The one place where the ledger is touched. Belongs to the event loop's thread.

    Rooms say which instructions they carry out, once, before the first event. Carrying one out must not
    block, and may feed events: they are taken in their turn.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._carriers: dict[type, list[Callable[[Any], None]]] = {}
        self._waiting: deque[Event] = deque()
        self._busy = False
        self._looking = False
        self._held = asyncio.Event()
        """Set once something is held; only then does time matter."""
        self._after: list[Callable[[], None]] = []
        self._log = structlog.get_logger("kvpushd.hub")

    def on(self, kind: type[I], carry: Callable[[I], None]) -> None:
        """From now on `carry` carries out instructions of this kind."""
        self._carriers.setdefault(kind, []).append(carry)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Has `call` called after events, from the loop: to look at what the ledger has become."""
        self._after.append(call)

    def feed(self, event: Event) -> None:
        """Takes an event in, and carries out what follows from it. Never raises."""
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._handle(self._waiting.popleft())
        finally:
            self._busy = False
        if not self._looking:
            # Once per turn of the loop, however many events it brought: looking costs more the more is held.
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _handle(self, event: Event) -> None:
        try:
            instructions = self.ledger.handle(event, now())
        except Exception:  # noqa: BLE001, logged with its traceback
            # Whoever fed it (a link, a session, the clock) must not die of an event that is another's.
            self._log.exception("event failed", event_type=type(event).__name__)
            return
        for instruction in instructions:
            self._carry(instruction)

    def _look(self) -> None:
        self._looking = False
        if not self.ledger.idle:
            self._held.set()
        for call in self._after:
            call()

    def _carry(self, instruction: Instruction) -> None:
        for carry in self._carriers[type(instruction)]:
            try:
                carry(instruction)
            except Exception:  # noqa: BLE001, logged with its traceback
                # One instruction that can't be carried out must not keep the others of its batch, which
                # belong to other transfers, from being so.
                self._log.exception("instruction failed", instruction=type(instruction).__name__)

    async def tick(self, every: float, idle: float) -> None:
        """Lets the ledger know that time passes, until cancelled: seldom while it holds nothing."""
        while True:
            if self.ledger.idle:
                self._held.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(idle):
                        await self._held.wait()
            else:
                await asyncio.sleep(every)
            self.feed(Tick())
