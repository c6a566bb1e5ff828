# SPDX-License-Identifier: Apache-2.0
"""How long a plan takes: `python -m benchmarks.plan`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from kvpush_client.layout import Group, Layer, Layout, Plane
from kvpushd.core.layout import Blocks, Window, check, check_blocks
from kvpushd.core.plan import Planner, window_bytes

CELL = 256


def by_layer(layers: int, blocks: int, size: int, heads: int, first: int, total: int, order: str) -> Layout:
    """A pool with K and V of a token in one row; `order` is HNC or NHC inside a block."""
    head, token = (size * CELL, CELL) if order == "HNC" else (CELL, heads * CELL)
    block = size * heads * CELL
    return Layout(
        pool_bytes=layers * blocks * block,
        blocks=blocks,
        groups=(Group(size),),
        layers=tuple(
            Layer(
                f"layers.{n}", 0, first, heads, total, (Plane(n * blocks * block, block, head, token, CELL),)
            )
            for n in range(layers)
        ),
    )


def by_block(layers: int, blocks: int, size: int, heads: int) -> Layout:
    """A pool in which a block has all of its layers together."""
    unit = size * heads * CELL
    return Layout(
        pool_bytes=layers * blocks * unit,
        blocks=blocks,
        groups=(Group(size),),
        layers=tuple(
            Layer(
                f"layers.{n}", 0, 0, heads, heads, (Plane(n * unit, layers * unit, size * CELL, CELL, CELL),)
            )
            for n in range(layers)
        ),
    )


def scattered(count: int, of: int, seed: int) -> list[Blocks]:
    """Blocks in no order."""
    return [Blocks(0, 0, np.array(random.Random(seed).sample(range(of), count), np.int64))]


def timed(call: Callable[[], object]) -> float:
    """Milliseconds, the best of several."""
    best = float("inf")
    for _ in range(7):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best * 1e3


def main() -> None:
    """Print one line per case."""
    cases = {
        "4 layers, one block": (
            by_layer(4, 256, 16, 8, 0, 8, "HNC"), by_layer(4, 256, 16, 8, 0, 8, "HNC"), 1, 1, 16),
        "16 layers, 64 blocks, equal TP": (
            by_layer(16, 256, 16, 8, 0, 8, "HNC"), by_layer(16, 256, 16, 8, 0, 8, "HNC"), 64, 64, 1024),
        "64 layers, 128 blocks, equal TP": (
            by_layer(64, 256, 16, 8, 0, 8, "HNC"), by_layer(64, 256, 16, 8, 0, 8, "HNC"), 128, 128, 2048),
        "64 layers, 128 blocks, last one in part": (
            by_layer(64, 256, 16, 8, 0, 8, "HNC"), by_layer(64, 256, 16, 8, 0, 8, "HNC"), 128, 128, 2043),
        "64 layers, 128 blocks, TP1 to TP2": (
            by_layer(64, 256, 16, 8, 0, 8, "HNC"), by_layer(64, 256, 16, 4, 4, 8, "HNC"), 128, 128, 2048),
        "64 layers, 128 blocks, HNC to NHC heads": (
            by_layer(64, 256, 16, 1, 0, 1, "HNC"), by_layer(64, 256, 16, 1, 0, 1, "NHC"), 128, 128, 2048),
        "64 layers, 128 blocks of 16, token rows TP1 to TP2": (
            by_layer(64, 256, 16, 8, 0, 8, "NHC"), by_layer(64, 256, 16, 4, 0, 8, "NHC"), 128, 128, 2048),
        "the same, last block in part": (
            by_layer(64, 256, 16, 8, 0, 8, "NHC"), by_layer(64, 256, 16, 4, 0, 8, "NHC"), 128, 128, 2043),
        "16 layers, 128 blocks of 16, 4 heads, HNC to NHC": (
            by_layer(16, 256, 16, 4, 0, 4, "HNC"), by_layer(16, 256, 16, 4, 0, 4, "NHC"), 128, 128, 2048),
        "64 layers, 128 blocks, blocks whole to blocks whole": (
            by_block(64, 256, 16, 8), by_block(64, 256, 16, 8), 128, 128, 2048),
        "64 layers, 128 blocks, layers whole to blocks whole": (
            by_layer(64, 256, 16, 8, 0, 8, "HNC"), by_block(64, 256, 16, 8), 128, 128, 2048),
        "64 layers, blocks whole to layers whole, blocks 16 to 24": (
            by_block(64, 256, 16, 8), by_layer(64, 256, 24, 8, 0, 8, "HNC"), 128, 86, 2048),
        "1 layer, 13,568 blocks of 4 KiB": (
            by_layer(1, 16384, 16, 1, 0, 1, "HNC"), by_layer(1, 16384, 16, 1, 0, 1, "HNC"),
            13568, 13568, 217088),
    }  # fmt: skip
    print(f"{'case':60} {'runs':>8} {'first ms':>8} {'plan ms':>8} {'bytes ms':>8} {'checks ms':>9}")
    for name, (source, target, count, other, end) in cases.items():
        mine, theirs = scattered(count, source.blocks, 1), scattered(other, target.blocks, 2)
        window = Window(0, end, 0, len(source.layers))
        planner = Planner(source, target)
        runs = planner.plan(mine, theirs, window)
        first = timed(lambda s=source, t=target, m=mine, o=theirs, w=window: Planner(s, t).plan(m, o, w))
        planned = timed(lambda p=planner, m=mine, o=theirs, w=window: p.plan(m, o, w))
        sized = timed(lambda s=source, t=target, w=window: window_bytes(s, t, w))
        checked = timed(lambda s=source, m=mine, e=end: (check(s), check_blocks(s, m, 0, e)))
        print(f"{name:60} {len(runs.length):8} {first:8.2f} {planned:8.2f} {sized:8.3f} {checked:9.2f}")


if __name__ == "__main__":
    main()
