# SPDX-License-Identifier: Apache-2.0
"""Two nodes of one authority, and an engine on each; a transfer between them that somebody has copied."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from kvpush_client.events import HandoffEnded, Matched, ReservationEnded, TransferKey
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.access.access_kit import Stolen
from tests.daemon.daemon_kit import assert_same, eventually, leftovers, papers, phase

SETTINGS = {"fence_patience": 0.5, "link_silence": 60.0, "connect_timeout": 20.0}
"""A thief says no beats, and a busy machine makes it slow."""
END = 4 * BLOCK
SENT, INTO = range(4), range(10, 14)


@dataclass
class Fleet:
    """Node `v` with the engine `s` that sends, node `d` with the engine `r` that receives."""

    folder: Path
    authority: trustme.CA
    v: Node
    d: Node
    s: Engine
    r: Engine

    def open(self, moment: str) -> TransferKey:
        """A transfer that both sides know: D's waits, or it is matched."""
        key = new_key()
        self.s.fill(SENT, seed=key.transfer_id[0])
        self.r.reserve(key, self.s, INTO, END, lease=600)
        eventually(lambda: self.v.status().held.links and phase(self.d, key))
        if moment == "matched":
            self.s.hand_off(key, SENT, lease=600)
            self.r.wait_for(Matched, key)
            self.s.wait_for(Matched, key)
        return key

    def finish(self, key: TransferKey, moment: str) -> None:
        """The transfer goes on as if nothing had been, byte for byte."""
        if moment == "waiting":
            self.s.hand_off(key, SENT)
        self.s.hand_off(key, (), END)
        self.s.advance(key, END)
        end = self.r.wait_for(ReservationEnded, key)
        assert end.fault is None, end
        assert self.s.wait_for(HandoffEnded, key).fault is None
        assert_same(self.s, SENT, self.r, INTO, END)
        assert not [
            e for e in self.r.heard + self.s.heard if hasattr(e, "key") and not isinstance(e, Matched)
        ]

    def stolen(self, key: TransferKey) -> Stolen:
        """All that can be copied of it."""
        (receiver,) = (e for e in self.d.engines() if e.engine_id == self.r.engine_id)
        return Stolen(
            key,
            bytes.fromhex(receiver.incarnation),
            self.r.engine_id,
            self.s.engine_id,
            b"p" * 16,
            "127.0.0.1",
            self.v.port,
        )


@pytest.fixture(scope="package")
def fleet() -> Iterator[Fleet]:
    """Started once for all; each test leaves nothing behind."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvp")))
        folder.chmod(0o755)  # what keeps others out is the daemon's own doing
        authority = trustme.CA()
        nodes = []
        for name in ("v.nodes", "d.nodes"):
            made = papers(folder, authority, name)
            node = Node(name, folder, **SETTINGS, **made, allowed_peers="*.nodes")
            stack.callback(node.close)
            nodes.append(node.launch())
        v, d = (node.wait_ready() for node in nodes)
        s, r = stack.enter_context(Engine(v, "s")), stack.enter_context(Engine(d, "r"))
        yield Fleet(folder, authority, v, d, s, r)
        for node in (v, d):
            assert not node.stumbles()


@pytest.fixture(autouse=True)
def nothing_left(fleet: Fleet) -> Iterator[None]:
    """After each test only the two engines are there."""
    yield
    for node in (fleet.v, fleet.d):
        eventually(
            lambda node=node: {  # type: ignore[misc]
                k: n for k, n in leftovers(node).items() if k in ("reservations", "handoffs", "writes")
            },
            lambda left: not left,
        )
