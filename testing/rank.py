# SPDX-License-Identifier: Apache-2.0
"""An engine of one process, without an engine: real sessions and a real pool, driven by a test.

What a vLLM connector does with its blocks, a test does here by hand, byte for byte.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvpush_client.events import Event, TransferKey
from kvpush_client.items import Sender
from kvpush_client.layout import Blocks, Group, Layer, Layout, Plane
from kvpush_client.pool import Pool
from kvpush_client.session import Identity, Role, Session
from testing.node import DEADLINE, Node

E = TypeVar("E", bound=Event)

BLOCK = 16
LAYERS = 4
HEADS = 2
CELL = 64
FINGERPRINT = {"model": "test", "protocol": "1"}


def layout(blocks: int, layers: int = LAYERS, heads: int = HEADS, block: int = BLOCK, cell: int = CELL) -> Layout:
    """Layers one after another, each (blocks, heads, tokens, cell)."""
    size = blocks * heads * block * cell
    return Layout(
        pool_bytes=layers * size,
        blocks=blocks,
        groups=(Group(block),),
        layers=tuple(
            Layer(
                f"layers.{i}", 0, 0, heads, heads, (Plane(i * size, heads * block * cell, block * cell, cell, cell),)
            )
            for i in range(layers)
        ),
    )


class Rank:
    """A scheduler's and a worker's session of one engine of one rank."""

    def __init__(self, node: Node, engine_id: str, blocks: int = 256, *, cell: int = CELL, block: int = BLOCK) -> None:
        self.engine_id = engine_id
        self.node = node
        self.layout = layout(blocks, cell=cell, block=block)
        self.pool = Pool.create(self.layout.pool_bytes, engine_id)
        self.bytes = np.frombuffer(self.pool.view, np.uint8).reshape(LAYERS, blocks, HEADS, block, cell)
        launch = secrets.token_hex(8)
        self.worker = Session(
            node.runtime_dir,
            Identity(engine_id, launch, Role.WORKER, fingerprint=FINGERPRINT),
            self.pool,
            self.layout,
        )
        self.scheduler = Session(
            node.runtime_dir, Identity(engine_id, launch, Role.SCHEDULER, fingerprint=FINGERPRINT)
        )
        self._seen: list[Event] = []

    def start(self) -> Rank:
        """Connects both sessions."""
        self.worker.start()
        self.scheduler.start()
        self.worker.wait_ready(DEADLINE)
        self.scheduler.wait_ready(DEADLINE)
        return self

    def __enter__(self) -> Rank:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both sessions."""
        self.scheduler.close()
        self.worker.close()

    @property
    def address(self) -> Sender:
        """Where receivers find this engine."""
        return Sender(self.engine_id, "127.0.0.1", self.node.port)

    def wait_for(self, kind: type[E], key: TransferKey | None = None, timeout: float = DEADLINE) -> E:
        """The next event of a kind (about a key) that the scheduler hears; takes it out."""
        return self.wait_until(lambda e: isinstance(e, kind) and key in (None, getattr(e, "key", None)), timeout)

    def wait_until(self, wanted: Callable[[Event], bool], timeout: float = DEADLINE) -> Event:
        """The first event that is wanted."""
        deadline = time.monotonic() + timeout
        while True:
            self._seen.extend(self.scheduler.poll())
            for event in self._seen:
                if wanted(event):
                    self._seen.remove(event)
                    return event
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.engine_id} heard only {self._seen}")
            time.sleep(0.001)

    @property
    def heard(self) -> list[Event]:
        """What was heard and not yet taken."""
        self._seen.extend(self.scheduler.poll())
        return list(self._seen)

    def fill(self, ids: Sequence[int], seed: int) -> None:
        """Writes what only this seed gives into blocks."""
        rng = np.random.default_rng(seed)
        for block in ids:
            self.bytes[:, block] = rng.integers(0, 256, self.bytes[:, block].shape, np.uint8)

    def reserve(self, key: TransferKey, sender: Rank, ids: Sequence[int], end: int, start: int = 0) -> None:
        """Reserves blocks for positions [start, end)."""
        size = self.layout.groups[0].block_size
        self.scheduler.reserve(key, [sender.address], start, end, [Blocks(0, start - start % size, list(ids))])

    def hand_off(self, key: TransferKey, ids: Sequence[int], seal: int | None) -> None:
        """Names blocks from position 0 on."""
        self.scheduler.handoff(key, [Blocks(0, 0, list(ids))], seal=seal)

    def advance(self, key: TransferKey, positions: int) -> None:
        """Says that positions below are final."""
        self.worker.advance(key, positions)
