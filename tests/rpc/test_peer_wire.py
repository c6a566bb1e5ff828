# SPDX-License-Identifier: Apache-2.0
"""Moments that a peer has said can be told again."""

from __future__ import annotations

import pytest

from kvpush_client._proto import types_pb2
from kvpushd.core.words import Times
from kvpushd.rpc.peer_wire import times_from_wire, times_to_wire


@pytest.mark.parametrize("said", [1, 7, 1_000_000])
def test_a_moment_of_long_ago_is_told_again_as_one(said: int) -> None:
    """The offset between the two clocks is not the same each time."""
    for _ in range(100):
        times = times_from_wire(types_pb2.TransferTimes(opened_unix_ns=said))
        assert 1 <= times_to_wire(times).opened_unix_ns < said + 1_000_000_000


def test_what_no_clock_has_shown_is_told_as_the_first_moment() -> None:
    assert times_to_wire(Times(opened=-(1 << 62))).opened_unix_ns == 1
