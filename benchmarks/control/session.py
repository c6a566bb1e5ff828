# SPDX-License-Identifier: Apache-2.0
"""What a session costs its engine, and how long an item and its answer take.

    python -m benchmarks.control.session

The service runs in another process, with a desk that answers each reservation at once. Prints, in
microseconds: one call of `poll` with nothing to hear; one call of `reserve` and of `advance` while the stream
keeps up (calls 100 us apart) and in a burst; and from `reserve` to the event in `poll`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvpush_client.layout import Blocks
from kvpush_client.pool import Pool
from kvpush_client.session import Session
from testing.front import LAYOUT, SENDERS, DaemonProcess, new_key, scheduler, worker

IDS = [Blocks(0, 0, list(range(128)))]


def timed(call: Callable[[], object], count: int, gap: float = 0.0) -> list[float]:
    """Microseconds of each call; `gap` seconds of sleep between calls."""
    took = []
    for _ in range(count):
        before = time.perf_counter()
        call()
        took.append((time.perf_counter() - before) * 1e6)
        if gap:
            time.sleep(gap)
    return took


def show(what: str, took: list[float]) -> None:
    """One line: median, 99th percentile, worst."""
    took.sort()
    p99 = took[int(len(took) * 0.99)]
    print(f"{what:44s} median {statistics.median(took):9.2f}  p99 {p99:9.2f}  max {took[-1]:10.1f}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory(prefix="kvp") as folder:
        daemon = DaemonProcess(Path(folder))
        pool = Pool.create(LAYOUT.pool_bytes, "benchmark")
        engine = Session(Path(folder), scheduler())
        rank = Session(Path(folder), worker(), pool, LAYOUT)
        for session in (engine, rank):
            session.start()
            session.wait_ready(20)
            session.poll()
        try:
            measure(engine, rank, count)
        finally:
            engine.close()
            rank.close()
            pool.close()
            daemon.kill()


def measure(engine: Session, rank: Session, count: int) -> None:
    """All of it."""
    key = new_key()

    def reserve() -> None:
        engine.reserve(new_key(), SENDERS, 0, 2048, IDS)

    def round_trip() -> None:
        engine.reserve(new_key(), SENDERS, 0, 2048, IDS, label="land")
        while not engine.poll():
            time.sleep(0.00002)

    started = time.perf_counter()
    for _ in range(count * 10):
        engine.poll()
    print(f"{'poll, nothing to hear':44s} mean   {(time.perf_counter() - started) * 1e5 / count:9.3f}")
    show("reserve, 128 blocks, one each 100 us", timed(reserve, count, gap=1e-4))
    show("reserve, 128 blocks, burst", timed(reserve, count))
    show("advance, one each 100 us", timed(lambda: rank.advance(key, 16), count, gap=1e-4))
    show("advance, burst", timed(lambda: rank.advance(key, 16), count))
    time.sleep(0.5)  # the bursts are through
    show("reserve to its event, one at a time", timed(round_trip, count // 5))


if __name__ == "__main__":
    main()
