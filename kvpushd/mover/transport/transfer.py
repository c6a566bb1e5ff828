# SPDX-License-Identifier: Apache-2.0
"""One transfer of NIXL's: a list of runs on either side, and the handle that carries one to the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpushd.core.runs import Int64s
from kvpushd.mover.transport.agents import DRAM

Errors = tuple[type[Exception], ...]
Rows = NDArray[np.uint64]


def rows(addresses: Int64s, lengths: Int64s) -> Rows:
    """A descriptor list: address, length and device of each run."""
    found = np.zeros((len(lengths), 3), np.uint64)
    found[:, 0] = addresses
    found[:, 1] = lengths
    return found


class Transfer:
    """WRITEs from near to far, begun as it is made. The lists are made for it alone.

    That takes 0.1 ms for hundreds of runs. Prepared lists, kept per pool, would save it only where all runs
    have one length, which merging undoes.
    """

    def __init__(
        self,
        sender: Any,
        agent: str,
        near: Rows,
        far: Rows,
        errors: Errors,
        bell: bytes = b"",
    ) -> None:
        """From memory of the agent `sender` to memory of the connected one called `agent`, which is told
        `bell` once all is there. Raises NIXL's `errors`."""
        self.runs = len(near)
        self._sender = sender
        self._errors = errors
        self._handles: list[Any] = []
        index = np.arange(len(near), dtype=np.int32)
        try:
            self._handles.append(sender.prep_xfer_dlist("", near, DRAM))
            self._handles.append(sender.prep_xfer_dlist(agent, far, DRAM))
            mine, theirs = self._handles
            self._transfer = sender.make_prepped_xfer("WRITE", mine, index, theirs, index, bell)
            self._handles.append(self._transfer)
            sender.transfer(self._transfer)
        except errors:
            self.release()
            raise

    def over(self) -> bool:
        """Whether all is there. To ask costs 3 us, and makes progress with it. Raises NIXL's errors."""
        return bool(self._sender.check_xfer_state(self._transfer) != "PROC")

    def release(self) -> None:
        """Lets go of the handle and the lists."""
        while self._handles:
            try:
                self._handles.pop().release()
            except self._errors:
                # The connection broke, and the agent holds on to the handle until it is destroyed.
                continue
