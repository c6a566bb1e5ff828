# SPDX-License-Identifier: Apache-2.0
"""What a mover may have of its transport with nothing to do."""

from __future__ import annotations

import pytest

from kvpush_client._proto import admin_pb2
from testing.handles import handles

SINCE = 1000


def mover(**other):
    return admin_pb2.Mover(**{"counted_unix_ns": SINCE + 1, **other})


@pytest.mark.parametrize(
    ("found", "pools", "receivers"),
    [
        (mover(registrations=1), 1, 1),
        (mover(outlets=1, registrations=2), 1, 1),
        (mover(outlets=1, registrations=6), 3, 1),
        (mover(inlets=1, registrations=2), 1, 0),
        (mover(), 0, 0),
    ],
)
def test_what_pools_and_peers_warrant_is_right(found, pools, receivers):
    assert handles(found, SINCE, pools, receivers) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (mover(outlets=1, registrations=2, transfers=1), "1 transfers are under way"),
        (mover(outlets=2, registrations=3), "2 outlets for 1 engines"),
        (mover(outlets=1, registrations=3), "3 registrations, not 2"),
        (mover(outlets=1, registrations=1), "1 registrations, not 2"),
        (mover(outlets=1, registrations=2, counted_unix_ns=SINCE - 1), "has not counted yet"),
    ],
)
def test_what_is_left_over_or_missing_is_named(found, said):
    (line,) = handles(found, SINCE, 1, 1)
    assert said in line
