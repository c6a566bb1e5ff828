# SPDX-License-Identifier: Apache-2.0
"""Whoever needs a task hears of its failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from kvpushd.node.tasks import Tasks


async def fail() -> None:
    raise MemoryError


async def end() -> None:
    pass


async def last() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("work", "failed"), [(fail, True), (end, False), (last, False)])
def test_a_failure_is_told_and_an_end_is_not(
    work: Callable[[], Coroutine[object, object, None]], failed: bool
) -> None:
    async def scene() -> list[bool]:
        told: list[bool] = []
        tasks = Tasks("test")
        tasks.start(work(), lambda: told.append(True))
        await asyncio.sleep(0)
        await tasks.close()
        await asyncio.sleep(0)
        return told

    assert asyncio.run(scene()) == [True] * failed
