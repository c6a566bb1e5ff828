# SPDX-License-Identifier: Apache-2.0
"""Plays scenarios: holds a transfer in its phase, strikes, watches all ends, heals, and looks again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time

import grpc

from testing.chaos.account import End, Played
from testing.chaos.asking import Asking
from testing.chaos.blows import Blows
from testing.chaos.books import Books
from testing.chaos.flow import Flow
from testing.chaos.healing import HEALED, Healing
from testing.chaos.hearing import Hearing, hearing_of
from testing.chaos.holds import REACH, Held, Holds
from testing.chaos.lives import Lives
from testing.chaos.scenario import MOVERS, Blow, Cast, Scenario, Whom
from testing.chaos.sight import OVER
from testing.chaos.stage import LEASE, RANKS, D, Legs, P, Stage, wait_for
from testing.clockwork.harness import EngineFailed, Request
from testing.engines import answer
from testing.processes import age, spares_of

ENDS = LEASE + 10.0
"""Seconds after the last fault within which every request has ended, or is given up."""
WINDOW = 2.0
"""Seconds over which a third node's throughput is measured, before the fault and after it."""
LIVED = 12.0
"""Seconds that a mover must have lived to be replaced at once: where one dies soon after another, there is a
pause, lest movers that die of the same cause take the machine."""
_TROUBLES = (
    TimeoutError,
    AssertionError,
    EngineFailed,
    OSError,
    RuntimeError,
    subprocess.TimeoutExpired,
    grpc.RpcError,
)


class Actor:
    """Plays one scenario after the other."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.books = Books(stage)
        self._lives = Lives(stage)
        self.lost = False
        """Something is left that a next scenario would suffer from: it needs another stage."""

    def play(self, scenario: Scenario) -> Played:
        """The scenario, and what became of it. Everything is up again afterwards, if anything can do that."""
        began = time.monotonic()
        played = Played(scenario)
        turn = _Turn(self.stage, self.books, self._lives, scenario, played)
        try:
            turn.play()
        except _TROUBLES as error:
            played.troubles.append(f"{type(error).__name__}: {error}")
            self._rescue(turn, played)
        turn.count_deaths()
        if played.leftovers:
            self.lost = True
        played.took = time.monotonic() - began
        return played

    def _rescue(self, turn: _Turn, played: Played) -> None:
        try:
            turn.healing.heal()
        except _TROUBLES as error:
            played.troubles.append(f"and can't be healed: {type(error).__name__}: {error}")
            self.lost = True


class _Turn:
    """One scenario's turn."""

    def __init__(self, stage: Stage, books: Books, lives: Lives, scenario: Scenario, played: Played) -> None:
        self._stage = stage
        self._books = books
        self._lives = lives
        self._scenario = scenario
        self._played = played
        self._sender = RANKS if scenario.cast is Cast.RANKS else P
        self._blows = Blows(stage, scenario)
        self._asking = Asking(stage, scenario)
        self.healing = Healing(stage, books, lives, self._blows, scenario, played)
        played.fired = self._blows.fired

    # --- in order ----------------------------------------------------------------------------------------

    def play(self) -> None:
        scenario, stage = self._scenario, self._stage
        self._played.deaths += self._lives.lost()  # since the last scenario
        if scenario.cast is Cast.RANKS:
            stage.begin(RANKS)
            stage.ready(RANKS)
            self._lives.take_ranks()
        if scenario.cast is Cast.ROUTER:
            stage.start_router()
        self._lives.take()
        strikes = scenario.strikes if scenario.timed else []
        seen = next((s.whom for s in strikes if s.whom in MOVERS and s.blow is Blow.KILL), None)
        if seen is not None and not self._has_lived(seen):
            seen = None
        restarts = self._restarts(seen)
        with self._flow() as flow:
            held = self._reach()
            before = flow.rate(WINDOW) if flow else 0.0
            self._strike(held)
            if flow:
                self._played.undisturbed = flow.rate(WINDOW) / before
        self._watch(held, seen, restarts)
        self.healing.heal()
        self._settle()
        self._moves_again()
        self._played.leftovers += self._books.strays() + self._books.descriptors()

    def count_deaths(self) -> None:
        """Holds against the scenario who has ended unasked, movers too, as all are up again."""
        self.healing.count_deaths()
        self._played.deaths += self._lives.lost_movers(self._blows)
        self._lives.take_movers()

    def _has_lived(self, mover: Whom) -> bool:
        """A spare is made as its mover begins; that one may have been made long before, as a spare."""
        spares = spares_of(self._stage.nodes[mover.node].pid)
        return any(age(spare) >= LIVED for spare in spares)

    def _flow(self) -> contextlib.AbstractContextManager[Flow | None]:
        return Flow(self._stage) if self._scenario.beside else contextlib.nullcontext()

    def _reach(self) -> Held:
        """Held in its phase. A phase that was missed is tried for once more: the machine has much to do."""
        holds = Holds(self._stage, self._scenario, self._asking.send)
        for attempt in (1, 2):
            legs = self._stage.new_legs(
                self._scenario.length, self._scenario.number, attempt, sender=self._sender
            )
            try:
                held = holds.hold(legs)
            except TimeoutError:
                self.healing.calm()
                if attempt == 2:
                    raise
                self._let_go(legs)
                continue
            self._played.bytes, self._played.writes = held.sight.bytes, held.sight.writes
            return held
        raise AssertionError("unreachable")

    def _let_go(self, legs: Legs) -> None:
        for request in (legs.p, legs.d):
            if request is not None:
                request.result(ENDS)

    def _strike(self, held: Held) -> None:
        for number, fault in enumerate(self._scenario.faults):
            if number:
                time.sleep(self._scenario.gap)
            self._blows.strike(fault)
        if held.stopped is not None and not self._scenario.hits(Whom.D_ENGINE, Blow.KILL):
            with contextlib.suppress(EngineFailed):
                self._stage.engines[held.stopped].kill(signal.SIGCONT)
        self._stage.link.shape(None)
        if held.later is not None:
            with contextlib.suppress(EngineFailed):  # it may be the one that was killed
                held.later(held.legs)
        self.healing.hurry(self._sender)

    def _watch(self, held: Held, mover: Whom | None, restarts: int) -> None:
        legs = held.legs
        requests = [(legs.sender, legs.p), (D, legs.d), *held.others]
        open_requests = [(name, request) for name, request in requests if request is not None]
        last = max(self._blows.at)
        deadline = last + ENDS + self._scenario.silence
        hearing = hearing_of(self._scenario)
        while True:
            if self._sender in self._blows.undo_due():
                self.healing.hurry(self._sender)
            now = time.monotonic()
            if hearing is not None:
                self._listen(hearing, legs)
            if mover is not None and self._played.replaced is None:
                status = self._stage.status(mover.node)
                if status is not None and status.ready and status.movers[0].restarts > restarts:
                    self._played.replaced = now - self._blows.at[0]
            done = all(request.done() for _, request in open_requests) and not self._blows.missed
            waits = [self._played.said, self._played.heard] if hearing is not None else []
            measured = None not in waits and (mover is None or self._played.replaced is not None)
            if (done and not self._blows.pending and measured) or now > deadline:
                break
            time.sleep(0.01)
        self._blows.undo_all()
        self._stage.board.clear()
        last = max(self._blows.at)
        if hearing is not None and self._played.said is None:
            self._played.troubles.append(f"not all of nodes {hearing.nodes} ever listed its end")
        if hearing is not None and self._played.heard is None:
            self._played.troubles.append(f"not all engines at {hearing.engines} ever heard of its end")
        for name, request in open_requests:
            self._judge(name, request, legs, last)
        self._judge_client(legs)
        self._measure_quarantine(legs)

    def _judge(self, name: str, request: Request, legs: Legs, last: float) -> None:
        try:
            output = request.result(0)
        except EngineFailed:
            return  # whether it was meant to end is counted as all is healed
        except TimeoutError:
            self._played.ends.append(End(name, time.monotonic() - last, "never"))
            self._played.troubles.append(f"a request of {name} never ended")
            return
        base = max(last, legs.sent.get(name, 0.0), self._blows.woken.get(name, 0.0))
        took = max(0.0, output.t_last - base)
        self._played.ends.append(End(name, took, output.finish_reason, output.external_cached_tokens or 0))
        if request not in (legs.p, legs.d):
            return
        wanted = answer(legs.tokens, legs.count if request is legs.d else 1)
        if output.finish_reason == "abort" and self._scenario.cast is Cast.ROUTER:
            wanted = wanted[: len(output.token_ids)]
        elif output.finish_reason != "length":
            self._played.troubles.append(f"a request of {name} ended with {output.finish_reason!r}")
        came = output.external_cached_tokens or 0
        if request is legs.d and came not in (0, len(legs.tokens) - 1):
            self._played.troubles.append(f"{came} positions came: neither all nor none, which is recomputed")
        if output.token_ids != wanted:
            self._played.troubles.append(f"{name} said {output.token_ids}, not {wanted}")

    def _judge_client(self, legs: Legs) -> None:
        if not self._asking.asked:
            return
        got = self._asking.client_got()
        if got is None and not self._scenario.ends(Whom.ROUTER):
            self._played.troubles.append("the router's client got no answer")
        if got is not None and got != answer(legs.tokens, legs.count):
            self._played.troubles.append(f"the router's client got {got}")

    def _measure_quarantine(self, legs: Legs) -> None:
        transfer = self._stage.look("d", legs.transfer_id)
        if transfer is not None and transfer.fault.detail and transfer.times.ended_unix_ns:
            took = (transfer.times.ended_unix_ns - self._blows.at_unix_ns) / 1e9
            self._played.quarantine = max(0.0, took)

    def _listen(self, hearing: Hearing, legs: Legs) -> None:
        """Notes when all nodes that have to list the transfer's end, and when all engines heard of it."""
        played, struck = self._played, self._blows.at[0]
        if played.said is None and all(self._lists_its_end(node, legs) for node in hearing.nodes):
            played.said = time.monotonic() - struck
        if played.heard is None:
            heard = [self._stage.ears.heard(node, legs.transfer_id) for node in hearing.engines]
            times = [at for at in heard if at is not None]
            if len(times) == len(heard):
                played.heard = max(times) - struck

    def _lists_its_end(self, node: str, legs: Legs) -> bool:
        transfer = self._stage.look(node, legs.transfer_id)
        return transfer is not None and transfer.half.phase in OVER

    def _restarts(self, mover: Whom | None) -> int:
        status = None if mover is None else self._stage.status(mover.node)
        return status.movers[0].restarts if status else 0

    # --- afterwards --------------------------------------------------------------------------------------

    def _settle(self, since_unix_ns: int = 0) -> None:
        held = ["not looked yet"]

        def nothing() -> bool:
            held[:] = self._books.held(since_unix_ns)
            return not held

        try:
            wait_for("all is back", nothing, HEALED)
        except TimeoutError:
            self._played.leftovers += held

    def _moves_again(self) -> None:
        """A clean transfer moves. Until links that were lost are made anew, prompts are computed."""
        began = time.monotonic()
        numbers = iter(range(1000))

        def moved() -> bool:
            legs = self._stage.new_legs(
                200, self._scenario.number, "again", next(numbers), sender=self._sender
            )
            self._asking.send(legs)
            assert legs.d is not None
            assert legs.p is not None
            output = legs.d.result(REACH)
            legs.p.result(REACH)
            assert output.token_ids == answer(legs.tokens, legs.count), f"a clean transfer gave {output}"
            return output.external_cached_tokens == len(legs.tokens) - 1

        wait_for("a clean transfer moves", moved, HEALED)
        self._played.again = time.monotonic() - began
        self._settle(time.time_ns())
