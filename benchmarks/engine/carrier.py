# SPDX-License-Identifier: Apache-2.0
"""Bytes over the link without an engine: raw NIXL to calibrate it, and a plain socket as a floor.

    python -m benchmarks.engine.carrier {sender,receiver}

A process at each end of the link, told what to do in JSON lines. `Carriers` starts and drives both.
"""

from __future__ import annotations

import base64
import json
import select
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from benchmarks.child import Child
from testing import netns

POOL_BYTES = 128 << 20
_WARM_UP = 2
_ENVIRONMENT = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "WARN"}


class Carriers:
    """Both processes, at the ends of a link."""

    def __init__(self, link: netns.Link) -> None:
        self._link = link
        self._sender, self._receiver = (
            Child(
                [*netns.prefix(name), sys.executable, "-m", "benchmarks.engine.carrier", role],
                environment=_ENVIRONMENT,
            )
            for name, role in zip(link.names, ("sender", "receiver"), strict=True)
        )
        self._sender.ask("meet", **self._receiver.ask("meet"))

    def nixl_seconds(self, size: int, run: int, times: int = 3) -> float:
        """The time of a raw NIXL WRITE of `size` bytes in scattered runs of `run` bytes.

        The fastest of a few: whatever else the machine does only adds to it.
        """
        self._receiver.tell("poll")
        found = self._sender.ask("write", bytes=size, run=run, times=times)
        self._receiver.ask("stop")
        return float(found["seconds"])

    def socket_seconds(self, size: int) -> float:
        """The time that `size` bytes take through a TCP socket."""
        found = self._receiver.ask("listen")
        sent = self._sender.ask("send", bytes=size, host=self._link.hosts[1], port=found["port"])
        self._receiver.hear()
        return float(sent["seconds"])

    def calibrate(self, size: int, run: int, seconds: float) -> float:
        """Shapes the link so that raw NIXL takes `seconds` for `size` bytes; returns what it then takes.

        Closer than 3 %, if a few steps get there.
        """
        rate = size / seconds
        took = 0.0
        for _ in range(6):
            self._link.shape(int(rate))
            took = self.nixl_seconds(size, run)
            if abs(took / seconds - 1) < 0.03:
                break
            rate *= min(max(took / seconds, 0.7), 1.4)
        return took

    def close(self) -> None:
        """Ends both."""
        for end in (self._sender, self._receiver):
            end.close()

    def __enter__(self) -> Carriers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _End:
    """One of the two processes."""

    def __init__(self, role: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._pool = np.ones(POOL_BYTES, np.uint8)
        # Best settings: no progress thread, polled from the only thread, runs merged by prepared lists.
        self._agent: Any = nixl_agent(role, nixl_agent_config(enable_prog_thread=False))
        self._address = self._pool.ctypes.data
        self._agent.register_memory([(self._address, POOL_BYTES, 0, "")], "DRAM")
        self._peer: Any = None
        self._peer_address = 0

    def run(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(self, f"_do_{command.pop('do')}")(**command)
            if answer is not None:
                print(json.dumps(answer), flush=True)

    def _do_meet(self, metadata: str = "", address: int = 0) -> dict[str, Any]:
        if metadata:
            self._peer = self._agent.add_remote_agent(base64.b64decode(metadata))
            self._peer_address = address
        return {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": self._address,
        }

    def _do_poll(self) -> None:
        while not select.select([sys.stdin], [], [], 0)[0]:
            self._agent.get_new_notifs()

    def _do_stop(self) -> dict[str, Any]:
        return {}

    def _do_write(self, bytes: int, run: int, times: int) -> dict[str, Any]:
        count = bytes // run
        places = np.random.default_rng(1).permutation(POOL_BYTES // run)[:count].astype(np.uint64) * run

        def listed(base: int, offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            rows = np.zeros((count, 3), np.uint64)
            rows[:, 0], rows[:, 1] = base + offsets, run
            return rows

        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", listed(self._address, places), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._peer, listed(self._peer_address, places[::-1]), "DRAM")
        indices = np.arange(count, dtype=np.int32)
        seconds = []
        for _ in range(_WARM_UP + times):
            begun = time.monotonic()
            handle = self._agent.make_prepped_xfer("WRITE", local, indices, remote, indices, b"")
            self._agent.transfer(handle)
            while self._agent.check_xfer_state(handle) != "DONE":
                pass
            seconds.append(time.monotonic() - begun)
            self._agent.release_xfer_handle(handle)
        return {"seconds": min(seconds[_WARM_UP:])}

    def _do_listen(self) -> dict[str, Any]:
        listener = socket.create_server(("", 0))
        threading.Thread(target=self._receive, args=(listener,)).start()
        return {"port": listener.getsockname()[1]}

    def _receive(self, listener: socket.socket) -> None:
        with listener, listener.accept()[0] as connection:
            view = memoryview(self._pool.data)
            while connection.recv_into(view, 1 << 20):
                pass
            connection.sendall(b".")
        print(json.dumps({"received": True}), flush=True)

    def _do_send(self, bytes: int, host: str, port: int) -> dict[str, Any]:
        view = memoryview(self._pool.data)
        with socket.create_connection((host, port)) as connection:
            begun = time.monotonic()
            left = bytes
            while left:
                left -= connection.send(view[: min(left, 1 << 20)])
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return {"seconds": time.monotonic() - begun}


if __name__ == "__main__":
    _End(sys.argv[1]).run()
