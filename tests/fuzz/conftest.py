# SPDX-License-Identifier: Apache-2.0
"""Daemons that have to bear it all, and two engines of each that nobody may harm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from testing.node import Node
from testing.rank import Engine
from tests.daemon.daemon_kit import descriptors, eventually, leftovers, papers, transfer
from tests.fuzz.doors.admin import AdminDoor
from tests.fuzz.doors.door import Door
from tests.fuzz.doors.engine import EngineDoor
from tests.fuzz.doors.fds import FdDoor
from tests.fuzz.doors.http import HttpDoor
from tests.fuzz.doors.peer import PeerDoor
from tests.fuzz.doors.raw import raw_doors
from tests.fuzz.doors.sender import SenderDoor
from tests.fuzz.doors.tls import DialedDoor, tls_doors

SETTINGS = {"lease": 0.3, "fence_patience": 0.3, "connect_timeout": 2.0, "link_silence": 5.0}
GROWTH = 24 << 20
"""Bytes of resident memory that caches with a bound, and fragments, may come to."""


@dataclass
class Target:
    """The daemon, its doors by name, and two engines, of which it has the first."""

    node: Node
    doors: dict[str, Door]
    s: Engine
    r: Engine
    rest: Callable[[], None]
    """Lets go of what the doors hold on purpose."""

    def state(self) -> dict[str, int]:
        """What must not grow: what the ledger holds, descriptors."""
        pids = {"daemon": self.node.pid, "mover": self.node.mover_pid}
        return leftovers(self.node) | {f"files of {name}": descriptors(pid) for name, pid in pids.items()}

    def memory(self) -> int:
        """Resident bytes of the daemon and its mover."""
        return sum(_resident(pid) for pid in (self.node.pid, self.node.mover_pid))

    def check(self, before: dict[str, int]) -> None:
        """All is as before, and the engines' own transfers go on."""
        self.rest()
        transfer(self.s, self.r)
        self.r.scheduler.poll()
        more = 8  # a connection or two that UCX keeps, or is closing
        eventually(
            lambda: {k: (v, before.get(k, 0)) for k, v in self.state().items()},
            lambda seen: all(
                now - was <= (more if name.startswith("files") else 0) for name, (now, was) in seen.items()
            ),
        )
        assert self.node.running
        assert not self.node.stumbles()


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture(scope="package")
def target() -> Iterator[Target]:
    """Leases are short, so that whatever is left open ends soon."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvp")))
        node = stack.enter_context(Node("fuzzed", folder, **SETTINGS))
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(node, "r"))
        sender, holding = SenderDoor(r), SenderDoor(r, holds=True)
        stack.callback(sender.close)
        stack.callback(holding.close)
        peer = PeerDoor(node, holding)
        doors: list[Door] = [EngineDoor(node), peer, sender, AdminDoor(node), HttpDoor(node)]
        found = Target(node, {}, s, r, peer.rest)
        for door in (*doors, FdDoor(node), *raw_doors(node)):
            found.doors[door.name] = door
        transfer(s, r)
        yield found


@pytest.fixture(scope="package")
def secured() -> Iterator[Target]:
    """A node that asks for certificates, as does the one that its engine sends to."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvp")))
        authority = trustme.CA()
        node, other = (
            stack.enter_context(Node(name, folder, **SETTINGS, **papers(folder, authority, name)))
            for name in ("v.nodes", "d.nodes")
        )
        s, r = stack.enter_context(Engine(node, "s")), stack.enter_context(Engine(other, "r"))
        dialed = DialedDoor(stack.enter_context(Engine(node, "dials")))
        stack.callback(dialed.close)
        doors: list[Door] = [*tls_doors(node, authority, folder), dialed]
        transfer(s, r)
        yield Target(node, {door.name: door for door in doors}, s, r, lambda: None)
