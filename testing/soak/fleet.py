# SPDX-License-Identifier: Apache-2.0
"""The processes of a soak: two nodes, P and D that live all the time, and a pair that is started anew."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testing import engines
from testing.clockwork import checkpoint
from testing.clockwork.harness import Engine, Harness, Stats
from testing.engines import START
from testing.node import Node

LEASE = 20.0
BLOCKS = 140
"""KV blocks of an engine: so few that requests are preempted."""
P, D, MORTAL = "P", "D", "mortal-D"


class Fleet:
    """Use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        geometry = checkpoint.Geometry()
        self._bytes = BLOCKS * engines.BLOCK * geometry.bytes_per_token
        self._model = checkpoint.write(folder / "model", geometry)
        self._harness = self._stack.enter_context(Harness(folder / "engines"))
        # Silences that a busy machine does not take for a death.
        calm: dict[str, Any] = {"lease": LEASE, "link_silence": 30, "mover_silence": 60}
        self.nodes = {name: self._stack.enter_context(Node(name, folder, **calm)) for name in ("p", "d")}
        self.engines: dict[str, Engine] = {}

    def __enter__(self) -> Fleet:
        try:
            for name in (P, D, MORTAL):
                self._launch(name)
            for name in (P, D, MORTAL):
                self.engines[name].ready(START)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything."""
        for engine in self.engines.values():
            engine.close()
        self._stack.close()

    def _launch(self, name: str) -> None:
        self.engines[name] = engines.launch(
            self._harness,
            name,
            "kv_producer" if name == P else "kv_consumer",
            self.nodes["p" if name == P else "d"],
            self._model,
            lease=LEASE,
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

    def params_for_d(self, transfer_id: bytes) -> dict[str, object]:
        """A receiver's leg, with P's static coordinates."""
        where = engines.coordinates(P, "127.0.0.1", self.nodes["p"].port)
        return {**engines.DECODE, **where, "transfer_id": transfer_id.hex()}

    @staticmethod
    def params_for_p(transfer_id: bytes) -> dict[str, object]:
        """P's leg."""
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

    def held(self) -> list[str]:
        """What is still held now, with nothing asked for; empty = nothing."""
        found = []
        for name, node in self.nodes.items():
            held = node.status().held
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
