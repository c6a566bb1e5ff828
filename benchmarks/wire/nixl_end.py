# SPDX-License-Identifier: Apache-2.0
"""One end of raw NIXL: `python -m benchmarks.wire.nixl_end {sender,receiver} POOL`, see nixl."""

from __future__ import annotations

import base64
import ctypes
import json
import select
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.wire import case
from benchmarks.wire.case import POOL_BYTES, Shape

_THREADS = (0, 1)
_PR_SET_TIMERSLACK = 29


class _End:
    def __init__(self, role: str, path: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        # Naps are as long as they say, and not 50 us longer.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
        self._pool = case.mapped(path)
        self._address = self._pool.ctypes.data
        self._agents: dict[int, Any] = {}
        for threads in _THREADS:
            # No progress thread: it spins a core, and halves the throughput of two on two.
            agent = nixl_agent(
                f"{role}-{threads}", nixl_agent_config(enable_prog_thread=False, num_threads=threads)
            )
            agent.register_memory([(self._address, POOL_BYTES, 0, "")], "DRAM")
            self._agents[threads] = agent
        self._peers: dict[int, Any] = {}
        self._theirs = 0
        self._prepared: dict[Any, Any] = {}

    def run(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(self, f"_do_{command.pop('do')}")(**command)
            if answer is not None:
                print(json.dumps(answer), flush=True)

    def _do_introduce(self) -> dict[str, Any]:
        data = {
            str(threads): base64.b64encode(agent.get_agent_metadata()).decode()
            for threads, agent in self._agents.items()
        }
        return {"metadata": data, "address": self._address}

    def _do_meet(self, metadata: dict[str, str], address: int) -> dict[str, Any]:
        for threads, data in metadata.items():
            self._peers[int(threads)] = self._agents[int(threads)].add_remote_agent(base64.b64decode(data))
        self._theirs = address
        return {}

    def _do_poll(self, nap: float, threads: int) -> None:
        agent = self._agents[threads]
        told = select.poll()
        told.register(sys.stdin, select.POLLIN)
        while not told.poll(0):
            agent.get_new_notifs()
            if nap:
                time.sleep(nap)

    def _do_stop(self) -> dict[str, Any]:
        return {}

    def _do_check(self, shape: Shape, run: int) -> dict[str, Any]:
        right = case.arrived(self._pool, shape, run)
        self._pool[:] = 1
        return {"right": right}

    def _do_prepare(self, shape: Shape, run: int, prepared: bool, threads: int, **_: Any) -> dict[str, Any]:
        if prepared and (run, threads) not in self._prepared:
            blocks = np.arange(POOL_BYTES // run, dtype=np.int64)
            self._prepared[run, threads] = self._lists(threads, blocks * run, blocks * run, run)
        case.places(shape, run)
        return {}

    def _do_write(
        self, shape: Shape, run: int, merged: bool, nap: float, pieces: int, threads: int, prepared: bool
    ) -> dict[str, Any]:
        agent = self._agents[threads]
        sources, targets = case.places(shape, run)
        begun = time.monotonic()
        transfers = []
        for near, far in zip(np.array_split(sources, pieces), np.array_split(targets, pieces), strict=True):
            if prepared:
                order = np.argsort(near)
                lists = self._prepared[run, threads]
                handle = agent.make_prepped_xfer(
                    "WRITE",
                    lists[0],
                    near[order].astype(np.int32),
                    lists[1],
                    far[order].astype(np.int32),
                    b"",
                )
            elif merged:
                begin, to, length = _merged(near * run, far * run, run)
                lists = self._lists(threads, begin, to, length)
                index = np.arange(len(begin), dtype=np.int32)
                handle = agent.make_prepped_xfer("WRITE", lists[0], index, lists[1], index, b"")
            else:
                local = agent.get_xfer_descs(self._rows(self._address, near * run, run), "DRAM")
                remote = agent.get_xfer_descs(self._rows(self._theirs, far * run, run), "DRAM")
                handle = agent.initialize_xfer("WRITE", local, remote, self._peer(threads), b"")
            agent.transfer(handle)
            transfers.append(handle)
        for handle in transfers:
            while agent.check_xfer_state(handle) != "DONE":
                if nap:
                    time.sleep(nap)
        seconds = time.monotonic() - begun
        for handle in transfers:
            agent.release_xfer_handle(handle)
        return {"seconds": seconds}

    def _peer(self, threads: int) -> str:
        peer = self._peers[threads]
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def _lists(self, threads: int, begin: Any, to: Any, length: Any) -> tuple[Any, Any]:
        agent = self._agents[threads]
        return (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(self._address, begin, length), "DRAM"),
            agent.prep_xfer_dlist(self._peer(threads), self._rows(self._theirs, to, length), "DRAM"),
        )

    @staticmethod
    def _rows(base: int, offsets: NDArray[np.int64], length: Any) -> NDArray[np.uint64]:
        rows = np.zeros((len(offsets), 3), np.uint64)
        rows[:, 0], rows[:, 1] = base + offsets, length
        return rows


def _merged(near: Any, far: Any, run: int) -> tuple[Any, Any, Any]:
    order = np.argsort(near)
    near, far = near[order], far[order]
    breaks = np.flatnonzero((np.diff(near) != run) | (np.diff(far) != run)) + 1
    first = np.concatenate(([0], breaks))
    count = np.diff(np.concatenate((first, [len(near)])))
    return near[first], far[first], count * run


if __name__ == "__main__":
    _End(*sys.argv[1:]).run()
