# SPDX-License-Identifier: Apache-2.0
"""What a stream's messages say of how many items came before theirs, checked.

Whatever carries a stream keeps its order and loses nothing, unless something is wrong; and whoever waits for
an item that was lost would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Lost(Exception):
    """Items of a stream did not arrive."""


class Count:
    """The items of one stream that were heard."""

    def __init__(self) -> None:
        self._heard = 0

    def new(self, items: Sequence[Item], first: int | None) -> Sequence[Item]:
        """Those of a message that were not heard before, and are from now on; `first` were said before them,
        where that was said. Raises Lost if some of these were not heard."""
        if first is None:
            first = self._heard
        if first > self._heard:
            raise Lost(f"{first - self._heard} items were lost on the way")
        fresh = items[self._heard - first :]
        self._heard += len(fresh)
        return fresh
