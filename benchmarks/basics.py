# SPDX-License-Identifier: Apache-2.0
"""The three things that must stay true, measured on real processes of this machine.

    PYTHONPATH=.:client python -m benchmarks.basics

1. No byte of KV passes through Python: the daemons don't map the pools, only the movers do, and a mover's
   calls are counted in runs, not in bytes.
2. A step of the engine pays under 100 us for the connector when nothing is to do (`benchmarks.step`, whole).
3. An idle daemon with its mover uses under 1 % of a core.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks import step
from benchmarks.idle import cpu_ns
from kvpush_client.events import HandoffEnded, ReservationEnded
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key

BLOCKS = 4096
MOVED = 2048


def mappings(pid: int, name: str) -> int:
    """How many mappings of a pool's memory a process has."""
    return Path(f"/proc/{pid}/maps").read_text().count(f"memfd:{name}")


def copies(p: Engine, d: Engine, nodes: tuple[Node, Node]) -> None:
    """Moves blocks, and shows who could have touched their bytes."""
    ids = range(MOVED)
    key = new_key()
    p.fill(ids, 1)
    d.reserve(key, p, ids, MOVED * BLOCK)
    p.send(key, ids, MOVED * BLOCK)
    end = d.wait_for(ReservationEnded, key)
    p.wait_for(HandoffEnded, key)
    print(f"moved {end.counts.bytes:,} bytes in {end.counts.runs} runs of {end.counts.chunks} writes")
    for node, engine in zip(nodes, (p, d), strict=True):
        daemon = mappings(node.pid, engine.engine_id)
        mover = mappings(node.mover_pid, engine.engine_id)
        print(f"node {node.name}: the daemon maps {daemon} pools of {engine.engine_id}, its mover {mover}")


def idle(nodes: tuple[Node, Node], seconds: float) -> None:
    """CPU of daemons and movers that have engines, links and inlets, and nothing to do."""
    time.sleep(2)
    pids = [(node, node.pid, node.mover_pid) for node in nodes]
    before = [(cpu_ns(daemon), cpu_ns(mover)) for _, daemon, mover in pids]
    time.sleep(seconds)
    for (node, daemon, mover), (daemon_then, mover_then) in zip(pids, before, strict=True):
        ours = (cpu_ns(daemon) - daemon_then) / seconds / 1e7
        its = (cpu_ns(mover) - mover_then) / seconds / 1e7
        print(f"node {node.name}: idle daemon {ours:.2f} % + mover {its:.2f} % of a core")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    with (
        tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder,
        Node("p", Path(folder)) as a,
        Node("d", Path(folder)) as b,
        Engine(a, "sender", BLOCKS) as p,
        Engine(b, "receiver", BLOCKS) as d,
    ):
        copies(p, d, (a, b))
        idle((a, b), seconds)
    step.main()


if __name__ == "__main__":
    main()
