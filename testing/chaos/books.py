# SPDX-License-Identifier: Apache-2.0
"""What is still held when nothing should be: by daemons, movers, engines, and the kernel."""

from __future__ import annotations

import os
from collections import defaultdict

from testing.chaos.stage import RANKS, D, P, Stage
from testing.clockwork.harness import EngineFailed
from testing.handles import handles
from testing.processes import began, is_mover, movers_of, spares_of

DESCRIPTORS_MORE = 24
"""Descriptors that a process may have more than it once had with nothing to do: links come and go."""


class Books:
    """Looks at all processes, and remembers what it saw."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._movers: set[tuple[int, int]] = set()
        self._descriptors: dict[int, int] = {}
        self._bad: dict[int, int] = defaultdict(int)
        self._moved: dict[tuple[str, int], tuple[int, int]] = {}
        self.most_descriptors_more = 0
        """The most by which a process's descriptors grew."""

    @property
    def wrong_bytes(self) -> int:
        """Bad cells that the witnesses of all engines have seen, those that are gone too."""
        return sum(self._bad.values()) + sum(
            log.read_text(errors="replace").count("clockwork: Mismatch")
            for log in self._stage.logs
            if log.exists()
        )

    @property
    def moved(self) -> tuple[int, int]:
        """Transfers that landed, and their bytes, as far as they were seen before a daemon ended."""
        return sum(landed for landed, _ in self._moved.values()), sum(n for _, n in self._moved.values())

    def engines_of(self, node: str) -> list[str]:
        """Engines that should be registered at a node now."""
        names = {"p": (P, RANKS), "d": (D,), "e": ()}[node]
        return [name for name in names if name in self._stage.engines]

    def held(self, since_unix_ns: int = 0) -> list[str]:
        """What is held that should be back, and who lives that should be gone; empty = nothing. What movers
        have of their transports counts as they counted it after `since_unix_ns`, if that is given."""
        found = [line for node in self._stage.nodes for line in self._of_node(node, since_unix_ns)]
        if not found:
            # Engines are asked last: each question keeps the ranks of a TP engine spinning for a second.
            found = [line for name in list(self._stage.engines) for line in self._of_engine(name)]
        return found

    def _of_node(self, name: str, since_unix_ns: int) -> list[str]:
        status = self._stage.status(name)
        if status is None:
            return [f"node {name} does not answer"]
        held, (mover,) = status.held, status.movers
        # Only P's node sends, to each engine that receives on D's.
        receivers = len(self.engines_of("d")) if name == "p" else 0
        self._moved[name, status.started_unix_ns] = (status.totals.landed, status.totals.bytes_received)
        engines = self.engines_of(name)
        pools = sum(2 if engine == RANKS else 1 for engine in engines)
        wanted = {
            "reservations": (held.reservations, 0),
            "handoffs": (held.handoffs, 0),
            "quarantined blocks": (held.quarantined_blocks, 0),
            "writes": (held.writes, 0),
            "engines": (held.engines, len(engines)),
            "pools": (held.pools, pools),
            "pools mapped": (mover.pools, pools),
        }
        wrong = [
            f"node {name} has {seen} {what}, not {want}"
            for what, (seen, want) in wanted.items()
            if seen != want
        ]
        # One inlet for each pair of a peer and an engine that receives here.
        if mover.inlets > len(engines):
            wrong.append(f"node {name} has {mover.inlets} inlets for {len(engines)} engines")
        if since_unix_ns:
            wrong += [f"node {name}: {line}" for line in handles(mover, since_unix_ns, pools, receivers)]
        if not status.ready:
            wrong.append(f"node {name} is not ready: {', '.join(status.problems)}")
        daemon = self._stage.nodes[name].pid
        children, spares = movers_of(daemon), spares_of(daemon)
        self._movers |= {(pid, began(pid)) for pid in (mover.pid, *children)}
        if children != sorted([mover.pid, *spares]) or len(spares) > 1:
            wrong.append(f"node {name} has movers {children}, {spares} of them spare, and says {mover.pid}")
        return wrong

    def _of_engine(self, name: str) -> list[str]:
        engine = self._stage.engines[name]
        try:
            # An idle engine looks at what its daemon said when it is next asked for something.
            engine.inspect("testing.clockwork.probes:ask_connector")
            stats = engine.stats()
        except (EngineFailed, TimeoutError) as error:
            return [f"{name}: {str(error).splitlines()[0]}"]
        self._bad[id(engine)] = stats.witness.bad_cells
        if not stats.idle or stats.free_blocks != stats.blocks - 1:
            return [
                f"{name} has {stats.free_blocks} free of {stats.blocks} blocks, "
                f"{stats.running} requests running and {stats.waiting} waiting"
            ]
        return []

    def strays(self) -> list[str]:
        """Movers that once were, and are not their daemon's any more, but live."""
        now = {(pid, began(pid)) for node in self._stage.nodes.values() for pid in movers_of(node.pid)}
        return [
            f"mover {pid} outlived its daemon"
            for pid, when in sorted(self._movers - now)
            if is_mover(pid) and began(pid) == when
        ]

    def descriptors(self) -> list[str]:
        """Processes that have more descriptors than when they were first seen idle."""
        wrong = []
        pids = {f"daemon {name}": node.pid for name, node in self._stage.nodes.items()}
        pids |= {f"mover {name}": node.mover_pid for name, node in self._stage.nodes.items()}
        for name, pid in pids.items():
            count = len(os.listdir(f"/proc/{pid}/fd"))
            more = count - self._descriptors.setdefault(pid, count)
            self.most_descriptors_more = max(self.most_descriptors_more, more)
            if more > DESCRIPTORS_MORE:
                wrong.append(f"{name} has {more} descriptors more than at first")
        return wrong
