# SPDX-License-Identifier: Apache-2.0
"""How far one sending rank's bytes have come on their way to one receiving rank."""

from __future__ import annotations

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
        for layer in range(first_layer, end):
            if self.final[layer] < positions:
                self.final[layer] = positions

    @property
    def everywhere(self) -> int:
        """One past the last position that is final in all layers."""
        return min(self.final, default=0)


@dataclass(slots=True)
class Lane:
    """One (sending rank, receiving rank) pair of a transfer: layers x positions, cut off window by window.

    `layers` are the sender's indices of the layers that both ranks hold. Each write takes a rectangle that
    lies between what was posted and the frontier.
    """

    source_rank: int
    target_rank: int
    layers: tuple[int, ...]
    granularity: int
    bytes_per_position: float
    """Over all of `layers`."""
    start: int
    end: int
    posted: list[int] = field(default_factory=list)
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Nothing is posted: a new attempt of the sender writes everything again."""
        self.posted = [self.start] * len(self.layers)
        self.in_flight = 0

    @property
    def done(self) -> bool:
        """All of it is posted, and every write of it has landed."""
        return self.in_flight == 0 and all(p >= self.end for p in self.posted)

    @property
    def remaining(self) -> int:
        """Bytes that are not posted yet."""
        if not self.layers:
            return 0
        left = sum(self.end - p for p in self.posted)
        return int(left * self.bytes_per_position / len(self.layers))

    def next_window(self, frontier: Frontier, named: int, most_bytes: int) -> Window | None:
        """The next rectangle that may be written, of at most about `most_bytes`; None if there is none.

        Only positions below `named` have blocks that are known.

        It begins with the first layer that lags, and takes the layers after it that are as far and may
        go as far: after a whole step these are all of them.
        """
        for i, layer in enumerate(self.layers):
            upto = self._movable(min(named, frontier.final[layer]))
            if self.posted[i] >= upto:
                continue
            last = i + 1
            while (
                last < len(self.layers)
                and self.posted[last] == self.posted[i]
                and self._movable(min(named, frontier.final[self.layers[last]])) == upto
            ):
                last += 1
            start = self.posted[i]
            end = min(upto, self._cut(start, last - i, most_bytes))
            return Window(start, end, layer, self.layers[last - 1] + 1)
        return None

    def post(self, window: Window) -> None:
        """Marks a window as posted."""
        for i, layer in enumerate(self.layers):
            if window.first_layer <= layer < window.end_layer:
                self.posted[i] = window.end
        self.in_flight += 1

    def bytes_of(self, window: Window) -> int:
        """What a window carries, about."""
        layers = sum(1 for layer in self.layers if window.first_layer <= layer < window.end_layer)
        return int((window.end - window.start) * layers * self.bytes_per_position / max(1, len(self.layers)))

    def _movable(self, final: int) -> int:
        # The block that holds `end` moves as a whole even where its rest is not final: the receiver
        # computes those positions itself, after this transfer.
        if final >= self.end:
            return self.end
        return final - final % self.granularity

    def _cut(self, start: int, layers: int, most_bytes: int) -> int:
        per_position = self.bytes_per_position * layers / len(self.layers)
        positions = max(1, int(most_bytes / per_position)) if per_position else self.end - start
        end = start + max(positions, self.granularity)
        return end if end >= self.end else max(end - end % self.granularity, start + 1)
