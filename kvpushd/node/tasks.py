# SPDX-License-Identifier: Apache-2.0
"""Background work of a room: kept referenced, its failures logged, ended with the room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog

from kvpushd.errors import KvpushError

Result = TypeVar("Result")


class Tasks:
    """Tasks that nobody awaits."""

    def __init__(self, name: str) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger(f"kvpushd.{name}")

    def start(
        self, work: Coroutine[Any, Any, Result], failed: Callable[[], None] | None = None
    ) -> asyncio.Task[Result]:
        """Starts one. `failed` is called where it ends with an exception."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, failed))
        return task

    def _done(self, failed: Callable[[], None] | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if failed is not None:
            failed()
        if isinstance(error, KvpushError):  # an answer, that whoever awaits it hears too
            self._log.warning("background work failed", fault=str(error.fault()))
        else:
            self._log.error("background work failed", error=repr(error), exc_info=error)

    async def close(self) -> None:
        """Cancels what is left, and waits for it."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
