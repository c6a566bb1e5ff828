# SPDX-License-Identifier: Apache-2.0
"""`make soak`: mixed load for minutes; nothing wrong, nothing grown.

    python -m testing.soak --minutes 30

Progress goes to stderr, the summary, one line of JSON, to stdout. Exit status: 0 all is well, 1 it is not.
The report lies in soak-results/.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from testing.soak.drive import Driver
from testing.soak.fleet import MORTAL, D, Fleet, P
from testing.soak.load import asks
from testing.soak.meters import Growth, Meters

RESULTS = Path("soak-results")
SAMPLES = 240
"""Looks at all processes, over the run."""
RESTARTS = 12
"""Times that an engine is killed and started again, over the run: mortal ones, in turn."""
LEAST_RATE = 20_000 / 30
"""Requests a minute below which the load was none."""
SETTLED = 60.0
"""Seconds after the last request within which all is back."""


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def soak(fleet: Fleet, minutes: float, seed: int, most: int) -> dict[str, Any]:
    """Runs; returns the summary."""
    driver = Driver(fleet, asks(seed), most)
    meters = Meters(fleet.pids(), {f"mover {name}": node for name, node in fleet.nodes.items()})
    seconds = minutes * 60
    began = time.monotonic()
    looks, restarts, told = 0, 0, 0
    restarting: threading.Thread | None = None
    while (at := time.monotonic() - began) < seconds:
        driver.turn()
        if at >= looks * seconds / SAMPLES:
            meters.look(at)
            looks += 1
        if restarting is not None and not restarting.is_alive():
            driver.dead, restarting = None, None
        if restarting is None and at >= (restarts + 0.5) * seconds / RESTARTS:
            driver.dead = MORTAL[restarts % len(MORTAL)]
            restarts += 1
            restarting = threading.Thread(target=fleet.restart, args=(driver.dead,))
            restarting.start()
        if at >= told * 30:
            say(f"[{at:6.0f} s] {len(driver.tally.done)} requests, {driver.tally.counts()}")
            told += 1
        time.sleep(0.002)
    asked = time.monotonic() - began
    if restarting is not None:
        restarting.join()
    while driver.turn(more=False):
        time.sleep(0.002)
    leftovers = settle(fleet, time.time_ns())
    stats = fleet.stats(fleet.engines)
    done = sorted(driver.tally.done, key=lambda one: one.number)
    growths = meters.growths()
    for growth in growths:
        say(told_of(growth))
    return {
        "minutes": round(asked / 60, 2),
        "seed": seed,
        "requests": len(done),
        "requests_per_s": round(len(done) / asked, 2),
        **driver.tally.counts(),
        "wrong_bytes": sum(one.witness.bad_cells for one in stats.values()),
        "preemptions": sum(stats[name].preemptions for name in (P, D)),
        "engine_restarts": restarts,
        "slow": len(done) < LEAST_RATE * asked / 60,
        "first_hundred": driver.tally.share(done[:100]),
        "last_hundred": driver.tally.share(done[-100:]),
        "leftovers": leftovers,
        "grown": [told_of(growth) for growth in growths if not growth.flat],
        "flat": {f"{g.process} {g.measure}": [round(g.median), round(g.growth, 1)] for g in growths},
        "failed": driver.tally.wrong[:20],
    }


def settle(fleet: Fleet, since_unix_ns: int) -> list[str]:
    """What is still held a while after the last request, which was over at `since_unix_ns`."""
    deadline = time.monotonic() + SETTLED
    while (held := fleet.held(since_unix_ns)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def told_of(growth: Growth) -> str:
    """A figure for people."""
    word = "flat" if growth.flat else "GROWS"
    scale, unit = (1 << 20, " MiB") if growth.measure == "resident_bytes" else (1, "")
    return (
        f"{growth.process} {growth.measure}: {growth.median / scale:.1f}{unit}, "
        f"trend {growth.growth / scale:+.2f}{unit}: {word}"
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m testing.soak", description="A long run.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=16, help="requests at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all that was started is ended
    with tempfile.TemporaryDirectory(prefix="kvs") as folder, Fleet(Path(folder)) as fleet:
        found = soak(fleet, options.minutes, options.seed, options.in_flight)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "soak-report.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    well = not (found["failed"] or found["grown"] or found["leftovers"] or found["wrong_bytes"])
    equally = found["first_hundred"]["right"] == found["last_hundred"]["right"] == 1.0
    loaded = found["preemptions"] and found["prefix_hits"] and found["left"] and not found["slow"]
    return 0 if well and equally and loaded else 1


if __name__ == "__main__":
    sys.exit(main())
