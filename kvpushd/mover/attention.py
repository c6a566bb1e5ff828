# SPDX-License-Identifier: Apache-2.0
"""How eagerly a mover polls: what the ledger knows of bytes that are due, as a level."""

from __future__ import annotations

from enum import IntEnum


class Attention(IntEnum):
    """The numbers of `kvpush.v1.Attention`."""

    IDLE = 1
    EXPECTING = 2
    FILLING = 3


# Seconds between two rounds. While bytes move the thread naps for less than a write's latency and does not
# spin: on a machine whose cores are taken, naps of 10 to 50 us doubled the throughput over loopback (1.0 to
# 2.1 GB/s), since the kernel's half of TCP needs the core too.
WAITS = {
    Attention.IDLE: 0.25,
    Attention.EXPECTING: 0.001,
    Attention.FILLING: 20e-6,
}
