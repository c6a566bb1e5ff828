# SPDX-License-Identifier: Apache-2.0
"""References of our own to vLLM's blocks.

vLLM frees blocks without asking a connector: in a preemption, inside `schedule()`; when a sliding window has
passed; at an abort or an end. A block that a half names must outlive all of these, so the half holds a
reference, as one more request with the same prefix would. Scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

_LONGEST_HOLD_S = 300.0


def longest_hold(lease: float | None) -> float:
    """For how many seconds after a request's end an engine goes on for blocks that only we hold.

    By its `lease`. A daemon that lives lets them go in less, if it is not configured with a longer one; one
    that stands still may never.
    """
    return max(_LONGEST_HOLD_S, 2 * (lease or 0.0))


class BlockPool(Protocol):
    """What is used of vLLM's block pool."""

    blocks: list[Any]

    def touch(self, blocks: list[Any]) -> None:
        """Take one reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop one reference to each block; the first is evicted first."""


class References:
    """Which blocks each owner holds. An owner may take more at any time, and drops all at once."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[Hashable, list[Any]] = {}

    def take(self, owner: Hashable, ids: Iterable[int]) -> None:
        """One reference to each block for `owner`. None of them may be the null block."""
        blocks = [self._pool.blocks[block_id] for block_id in ids]
        self._pool.touch(blocks)
        self._held.setdefault(owner, []).extend(blocks)

    def drop(self, owner: Hashable) -> None:
        """Give back all that `owner` holds; nothing if it holds nothing."""
        # Backwards, as vLLM does: the end of a prefix is evicted before its beginning.
        self._pool.free_blocks(reversed(self._held.pop(owner, [])))

    def is_null(self, block_id: int) -> bool:
        """The placeholder for what a window has passed: never named, never touched."""
        return bool(self._pool.blocks[block_id].is_null)

    def __len__(self) -> int:
        """References held by all owners."""
        return sum(len(blocks) for blocks in self._held.values())
