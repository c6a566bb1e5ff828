# SPDX-License-Identifier: Apache-2.0
"""One end of Mooncake: run as a script by the interpreter of its own environment, see mooncake."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 1024
"""Requests that its queue takes at a time; it refuses what is beyond."""


class _End:
    def __init__(self, path: str) -> None:
        self._cases = _cases()
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the transfer engine does not initialize over TCP")
        self._pool = self._cases.mapped(path)
        if self._engine.register_memory(self._pool.ctypes.data, self._pool.nbytes) != 0:
            raise RuntimeError("the transfer engine does not register the pool")
        self._host, self._theirs = "", 0
        where = {"host": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._pool.ctypes.data}
        print(json.dumps(where), flush=True)

    def run(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(self, f"_do_{command.pop('do')}")(**command)), flush=True)

    def _do_meet(self, host: str, address: int) -> dict[str, Any]:
        self._host, self._theirs = host, address
        return {}

    def _do_check(self, shape: str, run: int) -> dict[str, Any]:
        right = self._cases.arrived(self._pool, shape, run)
        self._pool[:] = 1
        return {"right": bool(right)}

    def _do_write(self, shape: str, run: int) -> dict[str, Any]:
        sources, targets = self._cases.places(shape, run)
        begun = time.monotonic()
        near = (sources * run + self._pool.ctypes.data).tolist()
        far = (targets * run + self._theirs).tolist()
        for first in range(0, len(near), BATCH):
            last = min(first + BATCH, len(near))
            status = self._engine.batch_transfer_sync_write(
                self._host, near[first:last], far[first:last], [run] * (last - first)
            )
            if status != 0:
                return {"status": status}
        return {"status": 0, "seconds": time.monotonic() - begun}


def _cases() -> Any:
    """The benchmark's own cases, by their file: its package is not in this environment."""
    path = Path(__file__).with_name("case.py")
    spec = importlib.util.spec_from_file_location("case", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["case"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _End(sys.argv[1]).run()
