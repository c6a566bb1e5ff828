# SPDX-License-Identifier: Apache-2.0
"""What UCX really uses between movers, by its own word.

NIXL has no call for it. UCX says it in a line of its log for each new kind of connection, e.g.

    ucp_worker.c:1997 UCX  INFO    node-a intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo tcp/eth0)

and its log goes to stdout, which is nobody's data in a mover: so it is read here, and all else of it goes on
to stderr. Neither end of the pipe blocks: what is said faster than it is read is lost, and nobody waits.
"""

from __future__ import annotations

import contextlib
import os
import re

LEVEL = "info"
"""UCX_LOG_LEVEL at which the line is said; at any above it nothing is known."""

_CONNECTION = re.compile(rb"(?:intra|inter)-node cfg#\d+ (?:rma|rma_am|put)\w*\(([^)]*)\)")
_CHATTER = re.compile(rb"UCX +(?:INFO|DIAG)\b")
_CHUNK = 1 << 16


class Lanes:
    """Names as UCX has them, transport/device, of everything that carries writes between movers."""

    def __init__(self, said: int, rest: int) -> None:
        """Reads the log from `said`, and writes what is none of it to `rest`; both stay the caller's."""
        os.set_blocking(said, False)
        self._said = said
        self._rest = rest
        self._begun = b""
        self._names: dict[str, None] = {}

    @classmethod
    def of_stdout(cls) -> Lanes:
        """Puts a pipe in the place of this process's stdout, before UCX is loaded, and reads that."""
        said, stdout = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(stdout, 1)
        os.close(stdout)
        return cls(said, 2)

    def names(self) -> list[str]:
        """All that were ever named, in their order."""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._said, _CHUNK):
                *lines, self._begun = (self._begun + more).split(b"\n")
                for line in lines:
                    self._hear(line)
        return list(self._names)

    def _hear(self, line: bytes) -> None:
        found = _CONNECTION.search(line)
        if found is not None:
            self._names.update(dict.fromkeys(found[1].decode("ascii", "replace").split()))
        if not _CHATTER.search(line):
            os.write(self._rest, line + b"\n")
