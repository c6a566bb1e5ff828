# SPDX-License-Identifier: Apache-2.0
"""Who has to hear of a scenario's fault, and how soon."""

from __future__ import annotations

from dataclasses import dataclass

from testing.chaos.scenario import MOVERS, Blow, Cut, Phase, Scenario, Strike, Whom
from testing.chaos.stage import DRAIN, SILENCE

VISIBLE = 1.0
"""Seconds within which who can see a fault has said it to whom it concerns."""
LOOK = 1.0
"""Seconds between two looks of a daemon at whether its mover is silent."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """On `nodes` the daemon lists the transfer's end, and on `engines`, nodes too, the engine heard of it, so
    many seconds after the fault."""

    nodes: tuple[str, ...]
    engines: tuple[str, ...]
    seconds: float

    @property
    def at_once(self) -> bool:
        """It is seen as it happens."""
        return self.seconds == VISIBLE


def hearing_of(scenario: Scenario) -> Hearing | None:
    """None where nobody need hear: the fault ends no transfer, or another fault or a crowd may hide it."""
    phase = scenario.phase
    if not scenario.timed:
        return None
    (fault,) = scenario.faults
    match fault:
        case Cut(seconds) if phase.matched and seconds > SILENCE:
            # A cable that is pulled resets no connection: on either side only silence tells. P's engine hears
            # as its blocks come back, for which what was written must have failed.
            return Hearing(("p", "d"), ("d",), SILENCE + VISIBLE)
        case Strike(whom=whom) if whom is not Whom.ROUTER:
            # Before P has handed off, its engine has nothing to hear of.
            concerns = phase.matched or (phase is Phase.ANNOUNCED and whom.at_p)
            delay = _delay(fault)
            if concerns and delay is not None:
                other = ("d" if whom.at_p else "p",)
                return Hearing(other, other, delay + VISIBLE)
    return None


def _delay(strike: Strike) -> float | None:
    """Seconds until the fault can be seen; None = it can't, or is none."""
    engine = strike.whom in (Whom.P_ENGINE, Whom.D_ENGINE)
    match strike.blow:
        case Blow.KILL:
            return 0.0
        case Blow.TERM if engine:
            return 0.0
        case Blow.TERM:
            # A daemon drains first. A mover does not end before its daemon's word: see `spares`.
            return None if strike.whom in MOVERS else DRAIN
        case Blow.STOP:
            # What an engine that stands still may cost is `Scenario.silence`.
            if engine or strike.seconds <= SILENCE:
                return None
            return SILENCE + LOOK if strike.whom in MOVERS else SILENCE


def spares(scenario: Scenario) -> bool:
    """The fault is none to a transfer that is matched: its KV comes nevertheless."""
    if not scenario.timed or not scenario.phase.matched:
        return False
    return any(strike.whom in MOVERS and strike.blow is Blow.TERM for strike in scenario.strikes)
