# SPDX-License-Identifier: Apache-2.0
"""Makes everything whole again after a scenario's faults, and measures how soon engines are back."""

from __future__ import annotations

import contextlib
import signal
import time

import grpc

from testing.chaos.account import Played
from testing.chaos.blows import Blows
from testing.chaos.books import Books
from testing.chaos.holds import FAST
from testing.chaos.lives import Lives
from testing.chaos.scenario import Cast, Scenario
from testing.chaos.stage import Stage, wait_for
from testing.clockwork.harness import EngineFailed

HEALED = 30.0
"""Seconds within which everything is back after all processes are up."""


class Healing:
    """What a turn needs to have all up again. Who has ended unasked is counted before that hides it."""

    def __init__(
        self, stage: Stage, books: Books, lives: Lives, blows: Blows, scenario: Scenario, played: Played
    ) -> None:
        self._stage = stage
        self._books = books
        self._lives = lives
        self._blows = blows
        self._scenario = scenario
        self._played = played

    def count_deaths(self) -> None:
        """Holds who has ended unasked since the last look against the scenario."""
        self._played.deaths += self._lives.lost(self._blows)

    def hurry(self, name: str) -> None:
        """What was held is not held any more."""
        if self._blows.stops(name):
            return
        # One whose ranks are dead may not have ended yet, and answers with an error.
        with contextlib.suppress(EngineFailed, RuntimeError):
            self._stage.engines[name].set_clock(FAST)

    def calm(self) -> None:
        """Everybody goes on, over a link that is as it should be."""
        self._blows.undo_all()
        self._stage.link.up(True)
        self._stage.link.shape(None)
        for name in list(self._stage.engines):
            with contextlib.suppress(EngineFailed):
                self._stage.engines[name].kill(signal.SIGCONT)
            self.hurry(name)

    def heal(self) -> None:
        """Everything is up: what was stopped goes on, what was killed is started again."""
        stage = self._stage
        self.count_deaths()
        launched: dict[str, float] = {}
        for name, node in stage.nodes.items():
            if node.running:
                node.signal(signal.SIGCONT)
            if node.running and self._blows.ends(name, node.pid):
                node.wait()
            if not node.running:
                launched[name] = time.monotonic()
                node.launch()
        for name in list(stage.engines):
            if self._blows.ended(name) or not stage.alive(name):
                stage.bury(name)
                stage.begin(name)
        self._lives.take()
        for name, node in stage.nodes.items():
            if name in launched:
                self._await_registration(name, launched[name])
            node.wait_ready()
        self.calm()
        if self._scenario.cast is Cast.ROUTER:
            stage.start_router()
            self._lives.take()
        for name in stage.engines:
            stage.ready(name)

    def _await_registration(self, name: str, launched: float) -> None:
        """Until a daemon that was started again is ready, and knows the engines that lived meanwhile."""
        living = {engine for engine in self._books.engines_of(name) if not self._blows.ended(engine)}
        node = self._stage.nodes[name]
        ready: list[float] = []

        def registered() -> bool:
            if not node.running:
                raise RuntimeError(f"the daemon of {name} ended as it was started again")
            try:
                if not ready and node.status().ready:
                    ready.append(time.monotonic())
                found = {e.engine_id for e in node.engines() if e.ranks_ready == e.local_ranks}
            except grpc.RpcError:
                return False
            return bool(ready) and living <= found

        wait_for(f"{sorted(living)} are registered at {name}", registered, HEALED)
        if living:
            now = time.monotonic()
            self._played.registered = now - ready[0]
            self._played.registered_from_start = now - launched
