# SPDX-License-Identifier: Apache-2.0
"""The engines of the node, as the ledger knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvpushd.core.layout import Layout, bytes_per_position
from kvpushd.core.words import LOCAL, Incarnation, LinkId, ReceiverView


@dataclass(slots=True)
class Engine:
    """One incarnation of one engine. `pools` fills as its ranks' pools are mapped for the first time."""

    incarnation: Incarnation
    engine_id: str
    fingerprint: Mapping[str, str]
    world_size: int
    local_ranks: int
    pools: dict[int, Layout] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)
    """The ranks whose pools are mapped now: none of them, after a mover's death, until they are again."""
    left: bool = False
    bytes_per_position: Counter[int] = field(default_factory=Counter)
    """Over all of `pools`, and kept here: with many layers it takes long to count."""

    def add(self, rank: int, layout: Layout) -> None:
        """A rank's pool is mapped. How it is cut does not change in the life of an incarnation: handoffs have
        been planned by it."""
        if rank not in self.pools:
            self.pools[rank] = layout
            self.bytes_per_position.update(bytes_per_position(layout))
        self.mapped.add(rank)

    def lacks(self, rank: int, first: int, end: int | None) -> str | None:
        """Says so where a rank's pool is known and does not have layers [first, end), or these are none. An
        `end` of None is the pool's."""
        layers = len(self.pools[rank].layers) if rank in self.pools else None
        if layers is None or 0 <= first < (layers if end is None else end) <= layers:
            return None
        said = f"layers [{first}, {'end' if end is None else end})"
        return f"rank {rank} of engine {self.engine_id} advanced {said}; its pool has layers [0, {layers})"

    def takes(self, positions: int) -> int:
        """The least bytes in which so many positions come, from a block's first one on: without what sliding
        windows keep of them."""
        return sum(size * piece * -(-positions // piece) for piece, size in self.bytes_per_position.items())

    @property
    def known(self) -> bool:
        """How all local ranks' pools are cut is known, and its sessions live."""
        return not self.left and len(self.pools) >= max(1, self.local_ranks)

    @property
    def ready(self) -> bool:
        """Moreover, all of them are mapped."""
        return self.known and len(self.mapped) == len(self.pools)

    @property
    def blocks(self) -> int:
        """Blocks of one rank; ranks of an engine have equally many."""
        return min((layout.blocks for layout in self.pools.values()), default=0)

    def as_receiver(self) -> ReceiverView:
        """The engine as the sending side of a link gets to know it."""
        return ReceiverView(
            self.engine_id, self.incarnation, self.fingerprint, self.world_size, dict(self.pools)
        )


class Engines:
    """By incarnation; and by engine_id, where the incarnation that came last counts."""

    def __init__(self) -> None:
        self._all: dict[Incarnation, Engine] = {}

    def add(self, engine: Engine) -> None:
        """Takes a new incarnation in."""
        self._all[engine.incarnation] = engine

    def remove(self, incarnation: Incarnation) -> None:
        """Forgets an incarnation."""
        self._all.pop(incarnation, None)

    def get(self, incarnation: Incarnation) -> Engine | None:
        """The engine, whether it has left or not; None once it was forgotten."""
        return self._all.get(incarnation)

    def named(self, engine_id: str) -> Engine | None:
        """The engine that has this name now."""
        found = None
        for engine in self._all.values():
            if engine.engine_id == engine_id and not engine.left:
                found = engine
        return found

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._all.values()))


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ledger holds itself to. Times in nanoseconds."""

    lease: int = 30_000_000_000
    """How long an unmatched half lives where it does not say."""
    fence_patience: int = 2_000_000_000
    """How long a sender may take to say that its writes are terminal, before its inlet is closed."""
    pinned_share: float = 0.25
    """The share of an engine's blocks that unmatched, sealed handoffs may pin."""
    halves_per_engine: int = 20_000
    """Live reservations, and live handoffs, of one engine."""
    write_bytes: int = 32 << 20
    """The most that one write carries, so that short transfers need not wait long for long ones."""
    link_bytes: int = 64 << 20
    """The most that is in flight to one link; a write always may go to an idle link."""
    engines_per_link: int = 64
    """Receiving engines that one link may describe."""
    halves_per_link: int = 100_000
    """Reservations that the engines of one link may have announced."""
    blocks_per_link: int = 1 << 24
    """Blocks that those may name in all: a list is small where it is said, and large where it is kept."""
    early_per_engine: int = 4096
    """How many handoffs may be advanced that an engine has not opened yet."""
    tombs_per_engine: int = 50_000
    """How many ended or cancelled keys of one engine are remembered."""
    tombs_per_link: int = 20_000
    """How many of the reservations of one link that ended are remembered: about 12 MB of them."""


def is_local(link: LinkId) -> bool:
    """Whether both engines are this node's."""
    return link == LOCAL
