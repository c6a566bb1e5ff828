# SPDX-License-Identifier: Apache-2.0
"""A real kvpushd as a process of a test, with its own runtime directory, ports and mover."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from kvpush_client._proto import admin_pb2, admin_pb2_grpc

DEADLINE = 20.0
"""Seconds within which what a test waits for must happen."""


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Node:
    """One node: `start` it, look at it through its admin socket, `signal` it, and `close` it."""

    def __init__(self, name: str, folder: Path, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        """`settings` are kvpushd's, dotted names with "__" for the dot. Links are insecure unless they say."""
        self.name = name
        self.runtime_dir = folder / name
        self.port = free_port()
        self.log = folder / f"{name}.log"
        self._env = dict(env or {})
        self._settings: dict[str, Any] = {
            "node": name,
            "runtime_dir": self.runtime_dir,
            "peer_host": "127.0.0.1",
            "peer_port": self.port,
            "http_port": 0,
            "insecure_peers": "tls__ca" not in settings,
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Node:
        """Starts the daemon and returns once it is ready. Raises RuntimeError with its log where it ends."""
        flags = [f"--{k.replace('__', '-').replace('_', '-')}={_text(v)}" for k, v in self._settings.items()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvpushd", *flags], stdout=log, stderr=log, env={**os.environ, **self._env}
            )
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self.status()
            except grpc.RpcError:
                time.sleep(0.02)
            else:
                return self
        raise RuntimeError(f"{self.name} is not ready:\n{self.log.read_text()[-3000:]}")

    def __enter__(self) -> Node:
        return self.start() if self._process is None else self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    def admin(self, method: str, request: Any) -> Any:
        """Calls one method of the admin service."""
        with grpc.insecure_channel(f"unix:{self.runtime_dir / 'admin.sock'}") as channel:
            return getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request, timeout=5)

    def status(self) -> admin_pb2.GetStatusResponse:
        """One look at the node."""
        found: admin_pb2.GetStatusResponse = self.admin("GetStatus", admin_pb2.GetStatusRequest())
        return found

    def transfers(self, transfer_id: bytes = b"") -> list[admin_pb2.Transfer]:
        """Transfers in flight and those that ended."""
        request = admin_pb2.ListTransfersRequest(transfer_id=transfer_id.hex())
        return list(self.admin("ListTransfers", request).transfers)

    @property
    def mover_pid(self) -> int:
        """The mover's process id."""
        return self.status().movers[0].pid

    def signal(self, number: signal.Signals) -> None:
        """Sends the daemon a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self, timeout: float = DEADLINE) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(timeout)
        self._process = None
        return status

    def close(self) -> None:
        """Ends it whatever it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
