# SPDX-License-Identifier: Apache-2.0
"""How eagerly a mover polls: what the ledger knows of bytes that are due, as a level."""

from __future__ import annotations

from enum import IntEnum


class Attention(IntEnum):
    """The numbers of `kvpush.v1.Attention`."""

    IDLE = 1
    EXPECTING = 2
    FILLING = 3


# Seconds between two rounds. While bytes move the thread naps and does not spin: two bare NIXL processes on
# a busy two-core machine moved 2.1 to 2.7 GB/s over loopback with naps of 10 us and 1.0 to 1.2 without,
# presumably since the kernel's half of TCP needs the core too. Between 0 and 300 us the mover itself showed
# no clear best there: 20 us is a choice, not an optimum.
WAITS = {
    Attention.IDLE: 0.25,
    Attention.EXPECTING: 0.001,
    Attention.FILLING: 20e-6,
}
