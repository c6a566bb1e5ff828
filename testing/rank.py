# SPDX-License-Identifier: Apache-2.0
"""An engine without an engine: real sessions and real pools, driven by a test.

What a vLLM connector does with its blocks, a test does here by hand, byte for byte.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from kvpush_client.events import Event, TransferKey
from kvpush_client.items import Sender
from kvpush_client.layout import Blocks, Group, Layer, Layout, Plane
from kvpush_client.pool import Pool
from kvpush_client.session import Identity, Role, Session
from testing.faults.board import Board
from testing.faults.catalog import CLIENT
from testing.faults.points import Points
from testing.faults.session import FaultySession
from testing.node import DEADLINE

E = TypeVar("E", bound=Event)
NewSession = Callable[..., Session]

BLOCK = 16
LAYERS = 4
HEADS = 2
CELL = 64
FINGERPRINT = {"model": "test", "protocol": "1"}


class Place(Protocol):
    """The node that an engine is on."""

    runtime_dir: Path
    port: int


def new_key(attempt: int = 0) -> TransferKey:
    """A transfer that nobody knows yet."""
    return TransferKey(secrets.token_bytes(16), attempt)


def layout(
    blocks: int,
    heads: int = HEADS,
    *,
    first_head: int = 0,
    total_heads: int = HEADS,
    block: int = BLOCK,
    cell: int = CELL,
) -> Layout:
    """Layers one after another, each (blocks, heads, tokens, cell)."""
    size = blocks * heads * block * cell
    layers = []
    for index in range(LAYERS):
        plane = Plane(index * size, heads * block * cell, block * cell, cell, cell)
        layers.append(Layer(f"layers.{index}", 0, first_head, heads, total_heads, (plane,)))
    return Layout(LAYERS * size, blocks, (Group(block),), tuple(layers))


class Rank:
    """One worker: its pool, its bytes as (layers, blocks, heads, tokens, cell), and its session."""

    def __init__(self, node: Place, identity: Identity, cut: Layout, new_session: NewSession) -> None:
        self.layout = cut
        self.pool = Pool.create(cut.pool_bytes, identity.engine_id)
        plane, heads = cut.layers[0].planes[0], cut.layers[0].heads
        shape = (LAYERS, cut.blocks, heads, cut.groups[0].block_size, plane.cell_bytes)
        self.bytes = np.frombuffer(self.pool.view, np.uint8).reshape(shape)
        self.session = new_session(node.runtime_dir, identity, self.pool, cut)

    def close(self) -> None:
        """Ends the session and lets go of the pool's descriptor; `bytes` can still be read."""
        self.session.close()
        self.pool.close()


class Engine:
    """A scheduler's session, and its ranks' workers, which share the heads among them."""

    def __init__(
        self,
        node: Place,
        engine_id: str,
        blocks: int = 256,
        *,
        ranks: int = 1,
        cell: int = CELL,
        block: int = BLOCK,
        fingerprint: Mapping[str, str] = FINGERPRINT,
        launch: str | None = None,
        board: Board | None = None,
    ) -> None:
        """With a `board` its sessions are of the test build, of a node that is called like the engine."""
        new_session: NewSession = Session
        if board is not None:
            new_session = partial(FaultySession, Points(board.folder, CLIENT, engine_id))
        self.engine_id = engine_id
        self.node = node
        launch = launch or secrets.token_hex(8)
        heads = HEADS // ranks
        common: dict[str, Any] = {"world_size": ranks, "local_ranks": ranks, "fingerprint": fingerprint}
        self.ranks = [
            Rank(
                node,
                Identity(engine_id, launch, Role.WORKER, rank=rank, **common),
                layout(blocks, heads, first_head=rank * heads, block=block, cell=cell),
                new_session,
            )
            for rank in range(ranks)
        ]
        identity = Identity(engine_id, launch, Role.SCHEDULER, **common)
        self.scheduler = new_session(node.runtime_dir, identity)
        self._block = block
        self._seen: list[Event] = []

    def start(self) -> Engine:
        """Connects all sessions."""
        self.begin()
        self.wait_ready()
        return self

    def begin(self) -> None:
        """Begins to connect."""
        for rank in self.ranks:
            rank.session.start()
        self.scheduler.start()

    def wait_ready(self, timeout: float = DEADLINE) -> None:
        """Returns once all sessions are connected. Raises what the sessions raise."""
        for rank in self.ranks:
            rank.session.wait_ready(timeout)
        self.scheduler.wait_ready(timeout)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all sessions, and their pools."""
        self.scheduler.close()
        for rank in self.ranks:
            rank.close()

    @property
    def address(self) -> Sender:
        """Where receivers find this engine."""
        return Sender(self.engine_id, "127.0.0.1", self.node.port)

    def where(self) -> Sender:
        """The same, for who asks from another process."""
        return self.address

    def ready(self) -> bool:
        """All sessions are connected."""
        return self.scheduler.ready and all(rank.session.ready for rank in self.ranks)

    # --- what it hears -----------------------------------------------------------------------------------

    def wait_for(self, kind: type[E], key: TransferKey | None = None, timeout: float = DEADLINE) -> E:
        """The next event of a kind (about a key) that the scheduler hears; takes it out."""

        def wanted(event: Event) -> bool:
            return isinstance(event, kind) and key in (None, getattr(event, "key", None))

        found = self.wait_until(wanted, timeout)
        assert isinstance(found, kind)
        return found

    def wait_until(self, wanted: Callable[[Event], bool], timeout: float = DEADLINE) -> Event:
        """The first event that is wanted; takes it out."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.heard:
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

    # --- its memory --------------------------------------------------------------------------------------

    def fill(self, ids: Sequence[int], seed: int) -> None:
        """Writes what only this seed gives into blocks, whatever the number of ranks."""
        one = self.ranks[0].bytes.shape
        rng = np.random.default_rng(seed)
        data = rng.integers(0, 256, (LAYERS, len(ids), HEADS, one[3], one[4]), np.uint8)
        heads = HEADS // len(self.ranks)
        for index, rank in enumerate(self.ranks):
            rank.bytes[:, list(ids)] = data[:, :, index * heads : (index + 1) * heads]

    def read(self, ids: Sequence[int], start: int, end: int) -> np.ndarray:
        """Positions [start, end) of what blocks hold from position 0 on: (positions, layers, heads, cell)."""
        whole = np.concatenate([rank.bytes[:, list(ids)] for rank in self.ranks], axis=2)
        by_token = whole.transpose(1, 3, 0, 2, 4)
        flat: np.ndarray = by_token.reshape(-1, *by_token.shape[2:])[start:end]
        return flat

    # --- what it says ------------------------------------------------------------------------------------

    def reserve(
        self,
        key: TransferKey,
        sender: Engine | Sender,
        ids: Sequence[int],
        end: int,
        start: int = 0,
        lease: float | None = None,
    ) -> None:
        """Reserves blocks for positions [start, end); `ids` hold the positions from start's block on."""
        address = sender if isinstance(sender, Sender) else sender.address
        blocks = [Blocks(0, start - start % self._block, list(ids))]
        self.scheduler.reserve(key, [address], start, end, blocks, lease=lease)

    def hand_off(
        self,
        key: TransferKey,
        ids: Sequence[int],
        seal: int | None = None,
        *,
        start: int = 0,
        lease: float | None = None,
    ) -> None:
        """Names blocks from position `start` on; without any, only seals."""
        blocks = [Blocks(0, start, list(ids))] if len(ids) else []
        self.scheduler.handoff(key, blocks, seal=seal, lease=lease)

    def advance(
        self, key: TransferKey, positions: int, first_layer: int = 0, end_layer: int | None = None
    ) -> None:
        """Says in all ranks that positions below are final in some layers."""
        for rank in self.ranks:
            rank.session.advance(key, positions, first_layer=first_layer, end_layer=end_layer)

    def send(self, key: TransferKey, ids: Sequence[int], positions: int) -> None:
        """Hands off a whole transfer at once."""
        self.hand_off(key, ids, positions)
        self.advance(key, positions)
