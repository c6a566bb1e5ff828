# SPDX-License-Identifier: Apache-2.0
"""A real kvpushd as a process of a test, with its own runtime directory, ports and mover."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from kvpush_client._proto import admin_pb2, admin_pb2_grpc
from kvpushctl.demo.ports import free_port
from testing import netns
from testing.faults.board import Board

DEADLINE = 30.0
"""Seconds within which what a test waits for must happen."""
START = 60.0
"""Seconds within which a daemon must be ready, on however busy a machine."""


class Node:
    """One node: `start` it, look at it through its admin socket, `signal` it, and `close` it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
        namespace: str | None = None,
        board: Board | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are kvpushd's, dotted names with "__" for the dot. Links are insecure by default.

        It runs in the network namespace `namespace`, if that is given. With a `board` it is of the test
        build, where the board's faults happen.
        """
        self.name = name
        self.runtime_dir = folder / name
        self.port = free_port()
        self.log = folder / f"{name}.log"
        self._module = "kvpushd" if board is None else "testing.faults.daemon"
        self._env = {**(env or {}), **(board.environment(name) if board is not None else {})}
        self._namespace = namespace
        self._settings: dict[str, Any] = {
            "node": name,
            "runtime_dir": self.runtime_dir,
            "peer_host": "127.0.0.1",
            "peer_port": self.port,
            "http_port": 0,
            "insecure_peers": "tls__ca" not in settings,
            "log__format": "json",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> Node:
        """Starts the daemon, and returns at once: several can start at a time. See `wait_ready`."""
        flags = [f"--{k.replace('__', '-').replace('_', '-')}={_text(v)}" for k, v in self._settings.items()]
        command = [*netns.prefix(self._namespace), sys.executable, "-m", self._module, *flags]
        with self.log.open("ab") as log:
            env = {**os.environ, **self._env}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        return self

    def wait_ready(self) -> Node:
        """Returns once it is ready. Raises RuntimeError with its log where it ends before that."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self.running:
            try:
                self.status()
            except grpc.RpcError:
                time.sleep(0.02)
            else:
                return self
        raise RuntimeError(f"{self.name} is not ready:\n{self.log.read_text()[-3000:]}")

    def start(self) -> Node:
        """Starts the daemon and returns once it is ready."""
        return self.launch().wait_ready()

    def __enter__(self) -> Node:
        return self.start() if self._process is None else self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    def stumbles(self) -> list[str]:
        """Lines of its log that show an exception that nobody expected: as JSON has it, or as Python does."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if '"exception": ' in line or line.startswith("Traceback")]

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def admin(self, method: str, request: Any) -> Any:
        """Calls one method of the admin service."""
        with grpc.insecure_channel(f"unix:{self.runtime_dir / 'admin.sock'}") as channel:
            return getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request, timeout=DEADLINE)

    def status(self) -> admin_pb2.GetStatusResponse:
        """One look at the node."""
        found: admin_pb2.GetStatusResponse = self.admin("GetStatus", admin_pb2.GetStatusRequest())
        return found

    def transfers(self, transfer_id: bytes = b"") -> list[admin_pb2.Transfer]:
        """Transfers in flight and those that ended."""
        request = admin_pb2.ListTransfersRequest(transfer_id=transfer_id.hex())
        return list(self.admin("ListTransfers", request).transfers)

    def peers(self) -> list[admin_pb2.Peer]:
        """Its links."""
        return list(self.admin("ListPeers", admin_pb2.ListPeersRequest()).peers)

    def engines(self) -> list[admin_pb2.Engine]:
        """Engines of the node."""
        return list(self.admin("ListEngines", admin_pb2.ListEnginesRequest()).engines)

    @property
    def mover_pid(self) -> int:
        """The mover's process id."""
        return self.status().movers[0].pid

    def http(self, path: str) -> tuple[int, str]:
        """Status and text of a GET at its HTTP port, which the log names."""
        port = re.findall(r'"http": ?"[^"]*:(\d+)"', self.log.read_text())[-1]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.http("/metrics")[1].splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    def signal(self, number: signal.Signals) -> None:
        """Sends the daemon a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def wait(self, timeout: float = DEADLINE) -> int:
        """Waits for its end; returns the exit status."""
        assert self._process is not None
        status = self._process.wait(timeout)
        self._process = None
        return status

    def stop(self, timeout: float = DEADLINE) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self.wait(timeout)

    def close(self) -> None:
        """Ends it whatever it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
