# SPDX-License-Identifier: Apache-2.0
"""How a transfer is brought into a phase and kept there."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from testing.chaos.scenario import Cast, Phase, Scenario
from testing.chaos.sight import Sight
from testing.chaos.stage import D, Legs, Stage, wait_for
from testing.clockwork.clock import Clock
from testing.clockwork.harness import Request
from testing.engines import prompt

REACH = 20.0
"""Seconds within which a phase must be reached."""
SLOW_LINK = 400_000
"""Bytes a second: less than an engine computes, so that writes stay in flight."""
CRAWL = Clock(seconds_per_prompt_token=0.006)
WALK = Clock(seconds_per_prompt_token=0.0015)
FAST = Clock()


@dataclass(slots=True)
class Held:
    """A transfer in its phase. `later` sends the leg that is missing; `others` are requests beside it.

    An engine that is `stopped` stands still to hold it.
    """

    legs: Legs
    sight: Sight
    later: Callable[[Legs], None] | None = None
    others: list[tuple[str, Request]] = field(default_factory=list)
    stopped: str | None = None


class Holds:
    """Brings a scenario's transfer into its phase."""

    def __init__(self, stage: Stage, scenario: Scenario, send_both: Callable[[Legs], None]) -> None:
        """`send_both` sends both legs at once, by whichever way."""
        self._stage = stage
        self._scenario = scenario
        self._send_both = send_both

    def hold(self, legs: Legs) -> Held:
        """Returns as soon as both nodes' lists show the phase. Raises TimeoutError where they never do."""
        sight = Sight(self._scenario.phase, len(legs.tokens), alone=not self._scenario.beside)
        held = Held(legs, sight)
        {
            Phase.UNRESERVED: self._unreserved,
            Phase.ANNOUNCED: self._announced,
            Phase.QUEUED: self._queued,
            Phase.BETWEEN: self._between,
            Phase.POSTING: self._posting,
            Phase.SEALED: self._sealed,
            Phase.LANDED: self._landed,
        }[self._scenario.phase](held)
        self._until_reached(held)
        return held

    def _unreserved(self, held: Held) -> None:
        self._one_leg(held, self._stage.send_p, D, self._stage.send_d)

    def _announced(self, held: Held) -> None:
        self._one_leg(held, self._stage.send_d, held.legs.sender, self._stage.send_p)

    def _one_leg(
        self, held: Held, send: Callable[[Legs], None], missing: str, later: Callable[[Legs], None]
    ) -> None:
        if self._scenario.cast is Cast.ROUTER:
            # A router sends both at once: one engine does not get to see its own.
            self._stop(held, missing)
            self._send_both(held.legs)
        else:
            send(held.legs)
            held.later = later

    def _queued(self, held: Held) -> None:
        stage, legs = self._stage, held.legs
        stage.configure(p=CRAWL, sender=legs.sender)
        before = stage.engines[legs.sender].submit(prompt(1200, legs.transfer_id), 1)
        held.others.append((legs.sender, before))
        self._send_both(legs)

    def _between(self, held: Held) -> None:
        self._stage.configure(p=CRAWL, sender=held.legs.sender)
        self._send_both(held.legs)

    def _posting(self, held: Held) -> None:
        self._stage.link.shape(SLOW_LINK)
        self._stage.configure(p=WALK, sender=held.legs.sender)
        self._send_both(held.legs)

    def _sealed(self, held: Held) -> None:
        self._stage.link.shape(SLOW_LINK)
        self._send_both(held.legs)

    def _landed(self, held: Held) -> None:
        stage = self._stage
        stage.configure(p=WALK, sender=held.legs.sender)
        self._send_both(held.legs)
        wait_for("D has reserved", lambda: stage.look("d", held.legs.transfer_id), REACH)
        self._stop(held, D)
        stage.configure(p=FAST, sender=held.legs.sender)

    def _stop(self, held: Held, name: str) -> None:
        held.stopped = name
        self._stage.engines[name].kill(signal.SIGSTOP)

    def _until_reached(self, held: Held) -> None:
        sight = held.sight

        def look() -> bool:
            self._look(held)
            return sight.missed or not sight.trouble

        with contextlib.suppress(TimeoutError):  # said below
            wait_for("held", look, REACH)
        if sight.trouble:
            raise TimeoutError(sight.trouble)

    def _look(self, held: Held) -> None:
        stage, sight, transfer_id = self._stage, held.sight, held.legs.transfer_id
        sight.p, sight.d = stage.look("p", transfer_id), stage.look("d", transfer_id)
        if sight.phase in (Phase.UNRESERVED, Phase.ANNOUNCED):
            from_d = [one for one in stage.nodes["p"].peers() if one.node == "d" and not one.receiving]
            sight.announced = sum(one.transfers for one in from_d if one.up)
        else:
            status = stage.status("p")
            sight.writes = status.held.writes if status else 0
