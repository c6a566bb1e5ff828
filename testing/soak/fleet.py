# SPDX-License-Identifier: Apache-2.0
"""The processes of a soak: two nodes, P and D that live all the time, and two that are started anew."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testing import engines
from testing.clockwork import checkpoint
from testing.clockwork.harness import Engine, Harness, Stats
from testing.engines import START
from testing.ensemble import Ensemble
from testing.handles import handles
from testing.node import Node

LEASE = 20.0
BLOCKS = 140
"""KV blocks of an engine: so few that requests are preempted."""
P, D = "P", "D"
MORTAL_P, MORTAL_D = MORTAL = ("mortal-P", "mortal-D")
SENDERS, RECEIVERS = (P, MORTAL_P), (D, MORTAL_D)


class Fleet(Ensemble):
    """P, D and the mortal ones, with what they need. `folder` gets logs and sockets: a short path."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        geometry = checkpoint.Geometry()
        self._bytes = BLOCKS * engines.BLOCK * geometry.bytes_per_token
        self._model = checkpoint.write(folder / "model", geometry)
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}

    def _begin(self) -> None:
        self._harness = self._stack.enter_context(Harness(self._folder / "engines"))
        # Silences that a busy machine does not take for a death.
        calm: dict[str, Any] = {"lease": LEASE, "link_silence": 30, "mover_silence": 60}
        for name in ("p", "d"):
            self.nodes[name] = node = Node(name, self._folder, **calm)
            self._stack.callback(node.close)
            node.start()
        self._stack.callback(self._close_engines)
        for name in (*SENDERS, *RECEIVERS):
            self._launch(name)
        for engine in self.engines.values():
            engine.ready(START)

    def _close_engines(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def _launch(self, name: str) -> None:
        self.engines[name] = engines.launch(
            self._harness,
            name,
            "kv_producer" if name in SENDERS else "kv_consumer",
            self.nodes["p" if name in SENDERS else "d"],
            self._model,
            extra={"lease": LEASE},
            kv_cache_bytes=self._bytes,
            max_num_batched_tokens=256,
            max_model_len=2048,
            enable_prefix_caching=True,
        )

    def restart(self, name: str) -> None:
        """Kills an engine and starts it again; returns once it is up."""
        self.engines[name].kill()
        self.engines[name].ended(START)
        self.engines[name].close()
        self._launch(name)
        self.engines[name].ready(START)

    def params_for_d(self, transfer_id: bytes, sender: str) -> dict[str, object]:
        """A receiver's leg, with the static coordinates of its sender."""
        where = engines.coordinates(sender, "127.0.0.1", self.nodes["p"].port)
        return {**engines.DECODE, **where, "transfer_id": transfer_id.hex()}

    @staticmethod
    def params_for_p(transfer_id: bytes) -> dict[str, object]:
        """A sender's leg."""
        return {**engines.PREFILL, "transfer_id": transfer_id.hex()}

    @staticmethod
    def new_transfer() -> bytes:
        """An id that nobody has used."""
        return secrets.token_bytes(16)

    def pids(self) -> dict[str, int]:
        """The processes that live all the time, by name."""
        found = {
            name: self.engines[name].inspect("testing.clockwork.probes:process_ids")[0] for name in (P, D)
        }
        for name, node in self.nodes.items():
            found |= {f"daemon {name}": node.pid, f"mover {name}": node.mover_pid}
        return found

    def held(self, since_unix_ns: int) -> list[str]:
        """What is still held now, with nothing asked for since then; empty = nothing."""
        found = []
        for name, node in self.nodes.items():
            status = node.status()
            (mover,), held = status.movers, status.held
            pools, ways = (len(SENDERS), len(RECEIVERS)) if name == "p" else (len(RECEIVERS), 0)
            found += [f"node {name}: {line}" for line in handles(mover, since_unix_ns, pools, ways)]
            for what in ("reservations", "handoffs", "quarantined_blocks", "writes"):
                if getattr(held, what):
                    found.append(f"node {name} has {getattr(held, what)} {what}")
        for name, stats in self.stats(self.engines).items():
            if stats.free_blocks != stats.blocks - 1:
                found.append(f"{name} has {stats.free_blocks} free of {stats.blocks} blocks")
        return found

    def stats(self, names: Iterable[str]) -> dict[str, Stats]:
        """Of engines, after they have looked at what their daemons said."""
        found = {}
        for name in names:
            self.engines[name].inspect("testing.clockwork.probes:ask_connector")
            found[name] = self.engines[name].stats()
        return found
