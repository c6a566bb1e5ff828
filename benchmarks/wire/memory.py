# SPDX-License-Identifier: Apache-2.0
"""What all contenders of the wire part read from and write to."""

from __future__ import annotations

import os

from benchmarks.wire import case as cases
from benchmarks.wire.case import POOL_BYTES
from kvpush_client.pool import Pool


class Memory:
    """A source, which holds the pattern, and a target.

    The same pages for all: of pools of their own, made in one way, one was copied 10 % faster than the next.
    """

    def __init__(self) -> None:
        """Raises OSError where memory is short."""
        self.source, self.target = (Pool.create(POOL_BYTES, name) for name in ("source", "target"))
        self.source.view[:] = cases.pattern().data
        self.target.prefault()

    @property
    def paths(self) -> dict[str, str]:
        """By role, what another process opens to map the pool that it sends from or receives in."""
        pools = {"sender": self.source, "receiver": self.target}
        return {role: f"/proc/{os.getpid()}/fd/{pool.fd}" for role, pool in pools.items()}

    def close(self) -> None:
        """Lets go of both."""
        self.source.close()
        self.target.close()
