# SPDX-License-Identifier: Apache-2.0
"""The floor: one block by raw NIXL between two processes, and the notification that it is there.

    python -m benchmarks.control.raw {writer,reader}

Told what to do in JSON lines. Both poll without a pause while a write is measured; else they sleep.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.child import Child

_POOL_BYTES = 1 << 20
_PAUSE = 1e-3
_ENVIRONMENT = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "WARN"}


class Raw:
    """A writing and a reading process. Raises RuntimeError where one ends."""

    def __init__(self, runs: int, run_bytes: int) -> None:
        """A block is so many runs of so many bytes."""
        self._block = {"runs": runs, "run_bytes": run_bytes}
        self._writer, self._reader = (
            Child([sys.executable, "-m", "benchmarks.control.raw", role], environment=_ENVIRONMENT)
            for role in ("writer", "reader")
        )
        self._writer.ask("meet", **self._reader.ask("meet"))

    def landings(self, count: int) -> list[float]:
        """Seconds from before a write is made until the reader has its notification, one at a time."""
        self._reader.ask("await", count=count)  # it looks
        begun = self._writer.ask("write", count=count, **self._block)["at"]
        ended = self._reader.hear()["at"]
        return [end - begin for begin, end in zip(begun, ended, strict=True)]

    def close(self) -> None:
        """Ends both."""
        for end in (self._writer, self._reader):
            end.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _End:
    """One of the two processes."""

    def __init__(self, role: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._pool = np.ones(_POOL_BYTES, np.uint8)
        self._agent: Any = nixl_agent(role, nixl_agent_config(enable_prog_thread=False))
        self._address = self._pool.ctypes.data
        self._agent.register_memory([(self._address, _POOL_BYTES, 0, "")], "DRAM")
        self._peer: Any = None
        self._peer_address = 0

    def run(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            getattr(self, f"_do_{command.pop('do')}")(**command)

    def _answer(self, **found: Any) -> None:
        print(json.dumps(found), flush=True)

    def _do_meet(self, metadata: str = "", address: int = 0) -> None:
        if metadata:
            self._peer = self._agent.add_remote_agent(base64.b64decode(metadata))
            self._peer_address = address
        own = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._answer(metadata=own, address=self._address)

    def _do_await(self, count: int) -> None:
        self._answer()
        at: list[float] = []
        while len(at) < count:
            if self._agent.get_new_notifs():
                at.append(time.monotonic())
        self._answer(at=at)

    def _do_write(self, count: int, runs: int, run_bytes: int) -> None:
        at = []
        for _ in range(count):
            time.sleep(_PAUSE)
            at.append(time.monotonic())
            self._write(runs, run_bytes)
        self._answer(at=at)

    def _write(self, runs: int, run_bytes: int) -> None:
        # Every second run, on both sides, so that they don't merge into one.
        rows = np.zeros((runs, 3), np.uint64)
        rows[:, 0], rows[:, 1] = np.arange(runs, dtype=np.uint64) * 2 * run_bytes, run_bytes
        near, far = rows.copy(), rows.copy()
        near[:, 0] += np.uint64(self._address)
        far[:, 0] += np.uint64(self._peer_address)
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", near, "DRAM")
        remote = self._agent.prep_xfer_dlist(self._peer, far, "DRAM")
        index = np.arange(runs, dtype=np.int32)
        handle = self._agent.make_prepped_xfer("WRITE", local, index, remote, index, b"landed")
        self._agent.transfer(handle)
        while self._agent.check_xfer_state(handle) != "DONE":
            pass
        for held in (handle, local, remote):
            held.release()


if __name__ == "__main__":
    _End(sys.argv[1]).run()
