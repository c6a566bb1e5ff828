# SPDX-License-Identifier: Apache-2.0
"""Who should live, and who has ended though nobody hit it."""

from __future__ import annotations

from testing.chaos.blows import Blows
from testing.chaos.names import ROUTER
from testing.chaos.stage import RANKS, Stage
from testing.clockwork.harness import Engine
from testing.processes import state


class Lives:
    """A roll of all processes: `take` it while all are up, `lost` then names those that have ended unasked.

    It outlasts a scenario, so that who dies between two of them is missed too.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._engines: dict[str, Engine] = {}
        self._ranks: dict[Engine, list[int]] = {}
        self._daemons: dict[str, int] = {}
        self._restarts: dict[str, tuple[int, int]] = {}
        """By node: its daemon, and how often that one's mover had been replaced."""
        self._router: int | None = None
        self.take()
        self.take_movers()

    def take(self) -> None:
        """Who is there now is missed from now on. For movers and ranks see below."""
        stage = self._stage
        self._engines = dict(stage.engines)
        self._ranks = {one: pids for one, pids in self._ranks.items() if one in stage.engines.values()}
        self._daemons = {name: node.pid for name, node in stage.nodes.items() if node.running}
        self._router = None if stage.router is None else stage.router.pid

    def take_ranks(self) -> None:
        """The same for the ranks of the engine that has some, which must be up. Asking keeps them spinning
        for a second, so they are asked once."""
        engine = self._stage.engines[RANKS]
        if engine not in self._ranks:
            self._ranks[engine] = self._stage.rank_pids(RANKS)

    def take_movers(self) -> None:
        """The same for movers: a daemon replaces one that died, and counts."""
        for name in self._stage.nodes:
            status = self._stage.status(name)
            if status is not None:
                self._restarts[name] = (self._stage.nodes[name].pid, status.movers[0].restarts)

    def lost(self, blows: Blows | None = None) -> list[str]:
        """Who has ended and was not hit; each is named once. Ask before anything is started again."""
        found = self._lost_engines(blows) + self._lost_daemons(blows)
        router = self._stage.router
        if router is not None and router.pid == self._router and router.poll() is not None:
            self._router = None
            if blows is None or not blows.ends(ROUTER, router.pid):
                found.append("the router")
        return found

    def lost_movers(self, blows: Blows | None = None) -> list[str]:
        """Whose mover died more often than it was made to. Ask once all are up again, then take anew."""
        found = []
        for name, (daemon, restarts) in self._restarts.items():
            status = self._stage.status(name)
            if status is None:
                continue  # whoever looks at the node says so
            same = self._stage.nodes[name].pid == daemon
            asked = blows is not None and same and blows.costs_mover(name)
            more = status.movers[0].restarts - (restarts if same else 0) - asked
            found += [f"the mover of {name}"] * max(0, more)
        return found

    def _lost_engines(self, blows: Blows | None) -> list[str]:
        found = []
        for name, engine in list(self._engines.items()):
            hit = blows is not None and blows.ends(name, engine)
            if self._stage.engines.get(name) is not engine:
                continue
            gone = [pid for pid in self._ranks.get(engine, ()) if state(pid) in ("", "Z")]
            dead = [f"a rank of {name}"] * len(gone) if self._stage.alive(name) else [name]
            if not dead:
                continue
            del self._engines[name]
            self._ranks.pop(engine, None)
            if not hit:
                found += dead
        return found

    def _lost_daemons(self, blows: Blows | None) -> list[str]:
        found = []
        for name, pid in list(self._daemons.items()):
            node = self._stage.nodes[name]
            if node.running and node.pid == pid:
                continue
            del self._daemons[name]
            if blows is None or not blows.ends(name, pid):
                found.append(f"the daemon of {name}")
        return found
