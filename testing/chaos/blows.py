# SPDX-License-Identifier: Apache-2.0
"""Carries faults out on a stage, says that they happened, and takes back what can be taken back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from testing.chaos.names import NAMES, PROCESSES, mover_of
from testing.chaos.scenario import Blow, Cut, Fault, Point, Scenario, Strike, Whom
from testing.chaos.stage import SILENCE, Stage, wait_for
from testing.clockwork.harness import Engine
from testing.faults.rules import Act, Rule
from testing.processes import state

SIGNALS = {Blow.KILL: signal.SIGKILL, Blow.TERM: signal.SIGTERM, Blow.STOP: signal.SIGSTOP}
SEEN = 2.0
"""Seconds within which a signal must have worked."""


class Blows:
    """The faults of one scenario."""

    def __init__(self, stage: Stage, scenario: Scenario) -> None:
        self._stage = stage
        self._scenario = scenario
        self._undo: list[tuple[float, str, Callable[[], None]]] = []
        """Until when, whom it keeps still if it does, and what ends it."""
        self.fired: list[str] = []
        self.at: list[float] = []
        """When each happened, CLOCK_MONOTONIC."""
        self.at_unix_ns = 0
        """When the first happened."""
        self._ended: dict[str, int | Engine] = {}
        """By the name of who was killed or told to end: the process, or whose engine's it was."""
        self._awaited: dict[str, Point] = {}
        self.woken: dict[str, float] = {}
        """Engines that stood still: since when they do not, CLOCK_MONOTONIC."""

    def strike(self, fault: Fault) -> None:
        """Carries one out; returns once it shows."""
        now = time.monotonic()
        self.at_unix_ns = self.at_unix_ns or time.time_ns()
        match fault:
            case Strike():
                self._signal(fault)
            case Cut(seconds):
                self._stage.link.up(False)
                self._undo.append((now + seconds, "", lambda: self._stage.link.up(True)))
            case Point():
                rule = rule_of(fault)
                self._stage.board.set([rule])
                self._awaited[rule.id] = fault
                if fault.act == "hang":
                    self._undo.append((now + fault.seconds, "", self._stage.board.clear))
        self.at.append(now)
        if not isinstance(fault, Point):
            self.fired.append(str(fault))

    @property
    def missed(self) -> bool:
        """Whether a fault point has not been come by yet. One that has been counts as fired from then on."""
        for firing in self._stage.board.record if self._awaited else ():
            fault = self._awaited.pop(firing.rule, None)
            if fault is None:
                continue
            self.fired.append(str(fault))
            # What came of it came after it.
            self.at.append(time.monotonic() - max(0.0, time.time() - firing.time))
            if fault.act == "exit":
                self._end(PROCESSES[fault.process, fault.node], firing.pid)
        return bool(self._awaited)

    def _signal(self, strike: Strike) -> None:
        number = SIGNALS[strike.blow]
        whom, name = strike.whom, NAMES[strike.whom]
        if whom in (Whom.P_ENGINE, Whom.D_ENGINE):
            engine = self._stage.engines[name]
            if strike.blow is not Blow.STOP:
                self._ended[name] = engine
            engine.kill(number)
            if strike.blow is Blow.STOP:
                self._undo_later(strike, lambda: self._wake(name))
            return
        pid = self._stage.pid(whom)
        if strike.blow is not Blow.STOP:
            self._end(name, pid)
        os.kill(pid, number)
        if strike.blow is Blow.KILL:
            wait_for(f"{whom.value} is gone", lambda: state(pid) in ("", "Z"), SEEN)
        if strike.blow is Blow.STOP:
            wait_for(f"{whom.value} stands still", lambda: state(pid) in ("T", "", "Z"), SEEN)
            self._undo_later(strike, lambda: go_on(pid))

    def _end(self, name: str, pid: int) -> None:
        self._ended[name] = self._stage.engines.get(name, pid)

    def _wake(self, name: str) -> None:
        self._stage.engines[name].kill(signal.SIGCONT)
        self.woken[name] = time.monotonic()

    def _undo_later(self, strike: Strike, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + strike.seconds, NAMES[strike.whom], undo))

    def ended(self, name: str) -> bool:
        """Whether somebody was killed, or told to end."""
        return name in self._ended

    def ends(self, name: str, one: int | Engine) -> bool:
        """Whether this process of somebody's, or this engine, was killed, or told to end."""
        return self._ended.get(name) == one

    def costs_mover(self, node: str) -> bool:
        """Whether a node's mover may have died of it: hit, silent for too long, or not believed any more."""
        for fault in self._scenario.faults:
            match fault:
                case Strike(whom=whom, blow=blow, seconds=seconds):
                    # Told to end, a mover waits for its daemon's word.
                    fatal = blow is Blow.KILL or (blow is Blow.STOP and seconds > SILENCE)
                    if NAMES[whom] == mover_of(node) and fatal:
                        return True
                case Point(node=where, process=process, point=point):
                    if where == node and (process == "mover" or point.startswith("mover.")):
                        return True
        return False

    def stops(self, name: str) -> bool:
        """Whether somebody stands still now."""
        return any(still == name for _, still, _ in self._undo)

    @property
    def pending(self) -> bool:
        """Whether something is to be taken back later."""
        return bool(self._undo)

    def undo_due(self) -> list[str]:
        """Takes back what has lasted long enough; says who goes on."""
        now = time.monotonic()
        due = [one for one in self._undo if one[0] <= now]
        self._undo = [one for one in self._undo if one[0] > now]
        for _, _, undo in due:
            undo()
        return [name for _, name, _ in due if name]

    def undo_all(self) -> None:
        """Takes all of it back."""
        for _, _, undo in self._undo:
            undo()
        self._undo.clear()


def rule_of(point: Point) -> Rule:
    """A fault as the board has it."""
    return Rule(
        point=point.point,
        act=Act(point.act),
        when=point.when,
        nth=point.nth,
        times=point.times,
        seconds=point.seconds,
        process=point.process,
        node=point.node,
    )


def go_on(pid: int) -> None:
    """SIGCONT, if it still lives."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
