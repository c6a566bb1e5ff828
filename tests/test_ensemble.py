# SPDX-License-Identifier: Apache-2.0
"""What a run has begun is closed with it, whether or not all of it came up."""

from __future__ import annotations

import pytest

from testing.ensemble import Ensemble


class Two(Ensemble):
    """Begins a first thing, then a second one."""

    def __init__(self, *, second_fails: bool) -> None:
        super().__init__()
        self.closed: list[str] = []
        self._second_fails = second_fails

    def _begin(self) -> None:
        self._stack.callback(self.closed.append, "first")
        if self._second_fails:
            raise OSError("no room for the second")
        self._stack.callback(self.closed.append, "second")


def test_all_is_closed_at_the_end_the_last_first() -> None:
    with Two(second_fails=False) as two:
        assert two.closed == []
    assert two.closed == ["second", "first"]


def test_what_had_begun_is_closed_where_the_next_one_does_not_start() -> None:
    two = Two(second_fails=True)
    with pytest.raises(OSError, match="no room"), two:
        pytest.fail("it began")
    assert two.closed == ["first"]
