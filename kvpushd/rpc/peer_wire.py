# SPDX-License-Identifier: Apache-2.0
"""Moments of a transfer between a node's monotonic clock and Unix time, as they travel."""

from __future__ import annotations

import time
from dataclasses import fields

from kvpush_client._proto import types_pb2
from kvpushd.core.words import Times
from kvpushd.errors import Invalid

MOST_UNIX_NS = (1 << 63) - 1
"""In the year 2262."""
NAMES = tuple(field.name for field in fields(Times))


def unix_offset() -> int:
    """Nanoseconds from the monotonic clock to Unix time."""
    return time.time_ns() - time.monotonic_ns()


def times_to_wire(times: Times) -> types_pb2.TransferTimes:
    """Moments by this node's clock, as Unix time; 1 for what lies before that, as a peer may have said."""
    offset = unix_offset()
    given = {name: getattr(times, name) for name in NAMES}
    return types_pb2.TransferTimes(**{f"{n}_unix_ns": max(at + offset, 1) for n, at in given.items() if at})


def times_from_wire(message: types_pb2.TransferTimes) -> Times:
    """The peer's moments on this node's monotonic clock: as true as the two nodes' clocks agree.

    Raises Invalid where one can't be told again: no clock shows it.
    """
    offset = unix_offset()
    given = {name: getattr(message, f"{name}_unix_ns") for name in NAMES}
    for name, at in given.items():
        if at > MOST_UNIX_NS:
            raise Invalid(f"times.{name}_unix_ns is {at}, expected {MOST_UNIX_NS} or less")
    return Times(**{name: at - offset for name, at in given.items() if at})
