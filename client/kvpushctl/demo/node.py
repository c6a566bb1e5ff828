# SPDX-License-Identifier: Apache-2.0
"""A kvpushd of the demo, as a node of its own on this host."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from kvpush_client._proto import admin_pb2
from kvpushctl.admin import SOCKET, connect
from kvpushctl.demo.certificates import Certificates
from kvpushctl.demo.environment import python
from kvpushctl.demo.processes import Child, Processes
from kvpushctl.errors import DaemonUnreachable

HOST = "127.0.0.1"
_READY_SECONDS = 60.0
_ENGINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """Its name, its folder of sockets, its process."""

    name: str
    runtime_dir: Path
    child: Child

    async def ready(self) -> admin_pb2.GetStatusResponse:
        """Its status as soon as it is ready. Raises CommandError if that never comes."""

        async def look() -> admin_pb2.GetStatusResponse | None:
            status = await asyncio.to_thread(self._status)
            return status if status is not None and status.ready else None

        return await self.child.until("readiness", look, _READY_SECONDS)

    async def engine(self) -> admin_pb2.Engine:
        """The engine that registered here, as soon as its pools are ready."""

        async def look() -> admin_pb2.Engine | None:
            with connect(self.runtime_dir) as admin:
                found = await asyncio.to_thread(admin.engines)
            whole = [one for one in found if one.local_ranks and one.ranks_ready == one.local_ranks]
            return whole[0] if whole else None

        return await self.child.until("the engine's registration", look, _ENGINE_SECONDS)

    def held(self) -> tuple[admin_pb2.Held, int]:
        """What is held now, and how many blocks engines hold for it."""
        with connect(self.runtime_dir) as admin:
            return admin.status().held, sum(one.held_blocks for one in admin.engines())

    def transfers(self) -> dict[str, list[admin_pb2.Transfer]]:
        """All that it remembers, by transfer id; attempts in the order in which they ended."""
        found: dict[str, list[admin_pb2.Transfer]] = {}
        with connect(self.runtime_dir) as admin:
            for one in reversed(admin.transfers()):
                found.setdefault(one.half.transfer_id, []).append(one)
        return found

    def _status(self) -> admin_pb2.GetStatusResponse | None:
        if not (self.runtime_dir / SOCKET).exists():
            return None
        try:
            with connect(self.runtime_dir) as admin:
                return admin.status()
        except DaemonUnreachable:
            return None  # its socket is there before its server is


async def start(
    processes: Processes, folder: Path, name: str, tls: Certificates, *, corrupt: bool = False
) -> Node:
    """Starts a daemon on ports that it chooses; the caller awaits its readiness.

    `corrupt` has it spoil what it writes, which it does only when told so twice.
    """
    runtime_dir = folder / name
    runtime_dir.mkdir(mode=0o700)
    file = folder / f"{name}.toml"
    file.write_text(config(name, runtime_dir, tls, corrupt=corrupt))
    env = {"KVPUSHD_ALLOW_FAULTS": "1"} if corrupt else {}
    child = await processes.start(name, python("-m", "kvpushd", "--config", str(file)), env)
    return Node(name, runtime_dir, child)


def config(name: str, runtime_dir: Path, tls: Certificates, *, corrupt: bool) -> str:
    """The daemon's configuration file."""

    def text(value: object) -> str:
        return json.dumps(str(value))  # JSON's strings are TOML's

    lines = [
        f"node = {text(name)}",
        f"runtime_dir = {text(runtime_dir)}",
        f"peer_host = {text(HOST)}",
        f"advertised_host = {text(HOST)}",
        "peer_port = 0",
        "http_port = 0",
        # Three engines start at once: a busy host must not look like a broken link.
        "link_silence = 60",
        "engine_silence = 60",
        "[tls]",
        f"ca = {text(tls.ca)}",
        f"cert = {text(tls.cert)}",
        f"key = {text(tls.key)}",
        "[ucx]",
        # Its listener authenticates nobody: nobody else shall reach it.
        'net_devices = "lo"',
    ]
    if corrupt:
        lines += ["[faults]", "corrupt_writes = true"]
    return "\n".join(lines) + "\n"
