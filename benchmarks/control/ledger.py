# SPDX-License-Identifier: Apache-2.0
"""What an event costs the ledger, by how many halves are open: `python -m benchmarks.control.ledger`."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from benchmarks.plan import by_layer
from kvpush_client.events import Side, TransferKey
from kvpushd.core.engines import Limits
from kvpushd.core.events import (
    Advanced,
    Cancelled,
    EngineJoined,
    Event,
    HandedOff,
    PoolMapped,
    Reserved,
    Tick,
    WriteEnded,
)
from kvpushd.core.instructions import Instruction, Post
from kvpushd.core.layout import Blocks
from kvpushd.core.ledger import Ledger
from kvpushd.core.words import LOCAL, SECOND, Incarnation, Instant, SenderAddress

P, D = Incarnation(b"p" * 16), Incarnation(b"d" * 16)
LAYERS, SIZE, HEADS = 32, 16, 8
PROMPT, CHUNK = 2048, 512
BLOCKS = 1 << 20


class Bench:
    """Both sides in one ledger, which does the work of two; with so many halves open, on each side."""

    def __init__(self, open_halves: int) -> None:
        self.ledger = Ledger(Limits(lease=3600 * SECOND, halves_per_engine=1 << 30))
        self.spent: defaultdict[str, list[float]] = defaultdict(list)
        self.now: Instant = SECOND
        self.block = 0
        pool = by_layer(LAYERS, BLOCKS, SIZE, HEADS, 0, HEADS, "HNC")
        for incarnation, name in ((P, "P"), (D, "D")):
            self.feed(EngineJoined(incarnation, name, {"model": "bench"}, 1, 1))
            self.feed(PoolMapped(incarnation, 0, pool))
        for i in range(open_halves):
            self.open(key(i))
        self.spent.clear()

    def feed(self, event: Event) -> list[Instruction]:
        """Hands an event to the ledger, and notes what that took."""
        self.now += 1000
        begun = time.thread_time()
        out = self.ledger.handle(event, self.now)
        self.spent[type(event).__name__].append(time.thread_time() - begun)
        return out

    def blocks(self, count: int) -> tuple[Blocks, ...]:
        """The next blocks of the pool."""
        first, self.block = self.block, (self.block + count) % (BLOCKS - count)
        return (Blocks(0, 0, np.arange(first, first + count)),)

    def open(self, transfer: TransferKey) -> None:
        """A reservation, and a handoff that has not begun: matched, and nothing moves."""
        sender = (SenderAddress("P", LOCAL),)
        self.feed(Reserved(D, transfer, sender, 0, PROMPT, self.blocks(PROMPT // SIZE)))
        self.feed(HandedOff(P, transfer))

    def run(self, transfer: TransferKey) -> None:
        """A whole transfer, chunk by chunk."""
        self.open(transfer)
        first = self.block
        for positions in range(CHUNK, PROMPT + 1, CHUNK):
            at, count = (positions - CHUNK) // SIZE, CHUNK // SIZE
            named = Blocks(0, at * SIZE, np.arange(first + at, first + at + count))
            self.feed(HandedOff(P, transfer, (named,), seal=PROMPT if positions == PROMPT else None))
            self.end_writes(self.feed(Advanced(P, 0, transfer, positions, self.now)))

    def end_writes(self, instructions: Iterable[Instruction]) -> None:
        """Every write that is posted ends well at once."""
        for do in instructions:
            if isinstance(do, Post):
                done = WriteEnded(do.write, None, do.bytes, 1, self.now, self.now)
                self.end_writes(self.feed(done))


def key(number: int) -> TransferKey:
    """One transfer's key."""
    return TransferKey(number.to_bytes(16, "big"))


def measure(open_halves: int, transfers: int) -> dict[str, float]:
    """Microseconds of CPU that an event takes, by its kind, and over all."""
    bench = Bench(open_halves)
    for i in range(transfers):
        bench.run(key(open_halves + i))
        bench.feed(Tick())
    for i in range(min(transfers, open_halves)):
        bench.feed(Cancelled(D, key(i), Side.RECEIVER))
    found = {name: sum(took) / len(took) * 1e6 for name, took in sorted(bench.spent.items())}
    everything = [took for kind in bench.spent.values() for took in kind]
    found["all"] = sum(everything) / len(everything) * 1e6
    return found


def main() -> None:
    """Prints a table."""
    sizes = [int(size) for size in sys.argv[1:]] or [100, 1_000, 10_000]
    columns = [measure(size, 200) for size in sizes]
    print(f"{'us per event, open halves:':28}" + "".join(f"{size:>10,}" for size in sizes))
    for name in columns[0]:
        print(f"{name:28}" + "".join(f"{column[name]:10.1f}" for column in columns))
    print(f"{'events per second':28}" + "".join(f"{1e6 / column['all']:10,.0f}" for column in columns))


if __name__ == "__main__":
    main()
