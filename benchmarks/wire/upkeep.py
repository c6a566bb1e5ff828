# SPDX-License-Identifier: Apache-2.0
"""What a node costs while nothing moves: CPU, and memory beside the pools, with eight peers connected.

Its processes are the daemon, the mover, and the spare that stands by to take the mover's place.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu import cpu_seconds
from benchmarks.report.statistics import Ratio, paired_ratio, summary
from benchmarks.report.tables import summaries
from benchmarks.report.values import Goal, Job, Row, Table, goal
from kvpush_client.events import ReservationEnded
from testing.node import Node
from testing.processes import spares_of
from testing.rank import Engine, new_key

PEERS = 8
CPU_SHARE = 0.01
"""Of a core, for all processes of the node together."""
MEMORY_BYTES = 200e6
_POOLS = re.compile(r"/memfd:")


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was found."""

    rows: list[Row]
    goals: list[Goal]
    table: Table
    fact: str


def measure(job: Job) -> Upkeep:
    """A node to which eight others have each sent once, and to which each sender is still linked."""
    job.say(f"upkeep: starting a node and {PEERS} peers")
    rows = []
    with _connected(job.folder) as node:
        # The timers of what has just ended: idle means that nothing was asked for a while.
        time.sleep(6)
        pids = {"daemon": node.pid, "mover": node.mover_pid, "spare": spares_of(node.pid)[0]}
        for count in range(job.rounds):
            before, begun = cpu_seconds(list(pids.values())), time.monotonic()
            time.sleep(1.0 if job.quick else 2.0)
            share = (cpu_seconds(list(pids.values())) - before) / (time.monotonic() - begun)
            values = {"cpu_share": share, "memory_bytes": sum(_beside_pools(pid) for pid in pids.values())}
            rows.append(Row("upkeep", "kvpushd", count, "trial", values))
        parts = ", ".join(f"{name} {_beside_pools(pid) / 1e6:.0f} MB" for name, pid in pids.items())
    shares = [row.values["cpu_share"] for row in rows]
    memory = [row.values["memory_bytes"] for row in rows]
    where = f"idle, {PEERS} peers"
    goals = [
        goal(11, "share of a core", "<=", CPU_SHARE, _plain(shares), where, "nothing"),
        goal(11, "resident bytes", "<=", MEMORY_BYTES, _plain(memory), where, "nothing"),
    ]
    found = [("kvpushd", "cpu_share", summary(shares)), ("kvpushd", "memory_bytes", summary(memory))]
    fact = f"memory is resident pages (PSS: shared ones count by share) but pools: {parts}"
    return Upkeep(rows, goals, summaries(f"Upkeep: daemon, mover and spare, {where}", found), fact)


@contextlib.contextmanager
def _connected(folder: Path) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        nodes = [Node(f"n{number}", folder) for number in range(PEERS + 1)]
        for node in nodes:
            node.launch()
            stack.callback(node.close)
        for node in nodes:
            node.wait_ready()
        engines = [stack.enter_context(Engine(node, f"e{i}")) for i, node in enumerate(nodes)]
        receiver = engines[0]
        for sender in engines[1:]:
            key = new_key()
            receiver.reserve(key, sender, [1, 2], 32)
            sender.send(key, [3, 4], 32)
            ended = receiver.wait_for(ReservationEnded, key)
            if ended.fault is not None:
                raise RuntimeError(f"a transfer to the idle node failed: {ended.fault}")
        yield nodes[0]


def _beside_pools(pid: int) -> int:
    """A process's proportional resident bytes, without what maps a memfd."""
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = not _POOLS.search(line)
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def _plain(values: list[float]) -> Ratio:
    """A measure of one contender as a ratio to one."""
    return paired_ratio([max(v, 1e-9) for v in values], [1.0] * len(values))
