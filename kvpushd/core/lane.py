# SPDX-License-Identifier: Apache-2.0
"""How far one sending rank's bytes have come on their way to one receiving rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpushd.core.layout import Window


@dataclass(slots=True)
class Frontier:
    """How far a handoff is final in one rank's pool: for each layer, one past the last final position."""

    final: list[int]

    @classmethod
    def at_start(cls, layers: int) -> Frontier:
        """Nothing is final."""
        return cls([0] * layers)

    def advance(self, positions: int, first_layer: int, end_layer: int | None) -> None:
        """Moves it; a frontier only grows."""
        end = len(self.final) if end_layer is None else min(end_layer, len(self.final))
        for layer in range(max(0, first_layer), end):
            if self.final[layer] < positions:
                self.final[layer] = positions

    @property
    def everywhere(self) -> int:
        """One past the last position that is final in all layers."""
        return min(self.final, default=0)


@dataclass(frozen=True, slots=True)
class Pair:
    """A sending and a receiving rank that have layers and heads in common: the same for every transfer."""

    source_rank: int
    target_rank: int
    layers: tuple[int, ...]
    """The sender's indices of the layers that both hold; ascending."""
    groups: Mapping[int, frozenset[int]]
    """The sender's groups that those layers are of, and the receiver's for each."""
    granularity: int
    """Positions that a window's start must be a multiple of."""
    whole: int
    """Positions at whose multiples a window ends that splits no block. A block that is split moves as runs of
    its heads' parts, and not as one."""
    bytes_per_position: int
    """Over all of `layers`."""


@dataclass(slots=True)
class Lane:
    """One pair of ranks of one transfer: layers x positions [start, end), cut off window by window.

    Each write takes a rectangle that lies between what was posted and the frontier.
    """

    pair: Pair
    start: int
    end: int
    posted: list[int] = field(default_factory=list)
    """For each of the pair's layers, one past the last position that was posted."""
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Nothing is posted: a new attempt of the sender writes everything again."""
        self.posted = [self.start] * len(self.pair.layers)
        self.in_flight = 0

    @property
    def done(self) -> bool:
        """All of it is posted, and every write of it has landed."""
        return self.in_flight == 0 and min(self.posted, default=self.end) >= self.end

    @property
    def remaining(self) -> int:
        """Bytes that are not posted yet, about."""
        return self._bytes(len(self.posted) * self.end - sum(self.posted))

    @property
    def whole(self) -> int:
        """Bytes of all of it, about."""
        return self._bytes(len(self.posted) * (self.end - self.start))

    def next_window(self, frontier: Frontier, named: int, most_bytes: int) -> Window | None:
        """The next rectangle that may be written, of at most about `most_bytes`; None if there is none.

        Only positions below `named` have blocks that are known.

        It begins with the first layer that lags, and takes the layers after it that are as far and may
        go as far: after a whole step these are all of them.
        """
        final = [frontier.final[layer] for layer in self.pair.layers]
        # After a whole step all layers are alike; then there is nothing to look for.
        alike = _alike(final) and _alike(self.posted)
        upto = [self._movable(min(named, position)) for position in (final[:1] if alike else final)]
        first = next((i for i, far in enumerate(upto) if self.posted[i] < far), None)
        if first is None:
            return None
        last = len(final) if alike else self._end_of_run(first, upto)
        start = self.posted[first]
        end = min(upto[first], self._cut(start, last - first, most_bytes))
        return Window(start, end, self.pair.layers[first], self.pair.layers[last - 1] + 1)

    def _end_of_run(self, first: int, upto: list[int]) -> int:
        """One past the last of the layers from `first` on that are as far and may go as far."""
        last = first + 1
        while last < len(upto) and (self.posted[last], upto[last]) == (self.posted[first], upto[first]):
            last += 1
        return last

    def post(self, window: Window) -> None:
        """Marks a window as posted."""
        for i, layer in enumerate(self.pair.layers):
            if window.first_layer <= layer < window.end_layer:
                self.posted[i] = window.end
        self.in_flight += 1

    def bytes_of(self, window: Window) -> int:
        """What a window carries, about."""
        layers = sum(1 for layer in self.pair.layers if window.first_layer <= layer < window.end_layer)
        return self._bytes((window.end - window.start) * layers)

    def _bytes(self, cells: int) -> int:
        """Of so many (layer, position)s."""
        return cells * self.pair.bytes_per_position // max(1, len(self.pair.layers))

    def _movable(self, final: int) -> int:
        # The block that holds `end` moves as a whole even where its rest is not final: the receiver
        # computes those positions itself, after this transfer.
        if final >= self.end:
            return self.end
        return final - final % self.pair.granularity

    def _cut(self, start: int, layers: int, most_bytes: int) -> int:
        """Where a window of so many layers ends that carries at most about `most_bytes`: behind a whole block
        if it may hold one."""
        unit = self.pair.granularity
        positions = most_bytes // max(1, self._bytes(layers))
        end = start + max(positions - positions % unit, unit)
        behind_block = end - end % self.pair.whole
        return min(behind_block if behind_block > start else end, self.end)


def _alike(numbers: list[int]) -> bool:
    return not numbers or numbers.count(numbers[0]) == len(numbers)
