# SPDX-License-Identifier: Apache-2.0
"""Two real daemons, each with an engine of one rank, and whole transfers of one block between them.

The engines are real sessions and pools without a model: all four clients live in this process, which looks
at them as often as an idle engine does, or, where latency is measured, almost at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control.hops import Landing
from benchmarks.cpu import cpu_seconds
from benchmarks.idle import status
from kvpush_client.events import HandoffEnded, Matched, ReservationEnded, TransferKey
from kvpush_client.items import Sender
from testing.node import DEADLINE, Node
from testing.rank import BLOCK, Engine, new_key

LOOK = 1e-3
"""Seconds between two looks of the clients: of an idle vLLM engine."""
SOON = 20e-6
"""The same where it must not be part of what is measured."""
SETTLE = 0.004
"""Seconds in which an announcement reaches the sender's daemon; not part of what is measured."""


@dataclass(frozen=True, slots=True)
class Cycles:
    """What some transfers took: all of them, each from reserve to landed, and CPU of every process."""

    seconds: float
    latencies: list[float]
    cpu_s: float

    @property
    def per_second(self) -> float:
        """How many ended in a second."""
        return len(self.latencies) / self.seconds


class Pair:
    """A sending and a receiving node. Raises what the daemons or sessions raise where they don't start."""

    def __init__(self, folder: Path, blocks: int, host: str = "127.0.0.1") -> None:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            settings: dict[str, Any] = {"ucx__tls": "tcp,self", "pinned_share": 1.0, "lease": 600.0}
            # Peers are addresses of one node.
            settings["limits__links_per_node"] = 1024
            self.nodes = [
                stack.enter_context(Node(name, folder, **settings, peer_host=host).launch())
                for name in ("p", "d")
            ]
            for node in self.nodes:
                node.wait_ready()
            self.sender = stack.enter_context(Engine(self.nodes[0], "sender", blocks))
            self.receiver = stack.enter_context(Engine(self.nodes[1], "receiver", blocks))
            self._ids = itertools.cycle(range(blocks))
            self._pids = [pid for node in self.nodes for pid in (node.pid, node.mover_pid)]
            self._stack = stack.pop_all()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # --- what the clients say and hear -------------------------------------------------------------------

    def reserve(self, at: Sender | None = None) -> TransferKey:
        """A reservation of one block."""
        key = new_key()
        self.receiver.reserve(key, at or self.sender, [next(self._ids)], BLOCK)
        return key

    def hand_off(self, key: TransferKey) -> None:
        """The whole handoff of one block, which is final."""
        self.sender.send(key, [next(self._ids)], BLOCK)

    def heard(self) -> list[Any]:
        """One look of all four clients; returns what the schedulers heard."""
        for engine in (self.sender, self.receiver):
            engine.ranks[0].session.poll()
        return [*self.receiver.scheduler.poll(), *self.sender.scheduler.poll()]

    def wait(self, done: Callable[[Any], bool], nap: float = LOOK) -> None:
        """Looks until `done` says so of an event. Raises TimeoutError, or RuntimeError where a half fails."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for event in self.heard():
                deadline = time.monotonic() + DEADLINE
                if getattr(event, "fault", None) is not None:
                    raise RuntimeError(f"a transfer ended badly: {event}")
                if done(event):
                    return
            time.sleep(nap)
        raise TimeoutError(f"nothing was heard for {DEADLINE:g} s")

    def open(self, count: int) -> None:
        """So many more reservations and handoffs that have met, and move nothing."""
        for _ in range(count):
            self.sender.hand_off(self.reserve(), [next(self._ids)])
        met = 0

        def all_met(event: Any) -> bool:
            nonlocal met
            met += isinstance(event, Matched)
            return met == 2 * count

        self.wait(all_met)

    def link(self, hosts: list[str]) -> None:
        """One transfer from the sender's node under each of these names, which are peers of their own."""
        for host in hosts:
            self.hand_off(self.reserve(Sender(self.sender.engine_id, host, self.nodes[0].port)))
        ends = 0

        def all_ended(event: Any) -> bool:
            nonlocal ends
            ends += isinstance(event, ReservationEnded | HandoffEnded)
            return ends == 2 * len(hosts)

        self.wait(all_ended)

    # --- what is measured --------------------------------------------------------------------------------

    def cpu_s(self) -> float:
        """CPU that daemons, movers and clients have used."""
        return self.node_cpu_s() + time.process_time()

    def node_cpu_s(self) -> float:
        """CPU that daemons and movers have used."""
        return cpu_seconds(self._pids)

    def node_bytes(self) -> int:
        """Memory of daemons and movers, pools left out."""
        return sum(status(pid)["RssAnon"] for pid in self._pids) << 10

    def landings(self, count: int) -> list[Landing]:
        """Handoffs of what is already reserved, one at a time."""
        return [self._landing() for _ in range(count)]

    def _landing(self) -> Landing:
        key, ends, landed = self.reserve(), 0, 0.0

        def ended(event: Any) -> bool:
            nonlocal ends, landed
            if isinstance(event, ReservationEnded):
                landed = time.monotonic()
            ends += isinstance(event, ReservationEnded | HandoffEnded)
            return ends == 2

        time.sleep(SETTLE)
        begun = time.monotonic()
        self.hand_off(key)
        self.wait(ended, SOON)
        return Landing(key, begun, landed)

    def cycles(self, open_requests: int, count: int) -> Cycles:
        """`count` whole transfers, so many open at any time: the next begins as one ends on both sides."""
        begun: dict[TransferKey, float] = {}
        latencies: list[float] = []
        ends: dict[TransferKey, int] = {}

        def start() -> None:
            now = time.monotonic()
            key = self.reserve()
            begun[key] = now
            self.hand_off(key)

        def ended(event: Any) -> bool:
            if not isinstance(event, ReservationEnded | HandoffEnded):
                return False
            if isinstance(event, ReservationEnded):
                latencies.append(time.monotonic() - begun[event.key])
            ends[event.key] = ends.get(event.key, 0) + 1
            if ends[event.key] == 2:
                if len(begun) < count:
                    start()
                return all_ended()
            return False

        def all_ended() -> bool:
            return len(latencies) == count and sum(ends.values()) == 2 * count

        cpu, since = self.cpu_s(), time.monotonic()
        for _ in range(min(open_requests, count)):
            start()
        self.wait(ended)
        return Cycles(time.monotonic() - since, latencies, self.cpu_s() - cpu)

    @contextlib.contextmanager
    def one_core(self) -> Iterator[None]:
        """Daemons, movers and this process share one core meanwhile."""
        pids = [*self._pids, os.getpid()]
        cores = os.sched_getaffinity(0)
        try:
            _pin(pids, {min(cores)})
            yield
        finally:
            _pin(pids, cores)


def _pin(pids: list[int], cores: set[int]) -> None:
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(task.name), cores)
