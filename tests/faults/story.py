# SPDX-License-Identifier: Apache-2.0
"""One story over real daemons in which every message of links, sessions and movers is said."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from kvpush_client.events import (
    HandoffEnded,
    Reason,
    Rejected,
    ReservationEnded,
    ReservationReleased,
    Side,
    TransferKey,
)
from testing.faults.board import Board
from testing.faults.rules import Act, Rule
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.daemon_kit import assert_same, eventually, leftovers, transfer

LEASE = 2.0
SETTINGS = {
    "lease": LEASE,
    "link_silence": 3.0,
    "mover_silence": 4.0,
    "fence_patience": 0.5,
    "connect_timeout": 3.0,
    "drain_timeout": 5.0,
}
HANGS = {"peer": 4.0, "session": 1.0, "mover": 6.0, "nixl": 6.0, "local": 6.0, "fds": 6.0, "notice": 6.0}
"""Seconds that a hang lasts: longer than the patience of whoever watches over a link or a mover, or than an
answer of fd.sock may take. Nobody watches over a session whose other end lives."""
IDS = range(16)
TARGETS = range(15, -1, -1)
"""Where they land: in the other order, so that no two blocks are one run."""
END = len(IDS) * BLOCK

_names = itertools.count()

Ends = tuple[Reason | None, Reason | None]
"""How a transfer ended for D and for P; None = all has landed."""


@dataclass
class Pair:
    """Two nodes of the test build, and their board."""

    p: Node
    d: Node
    board: Board

    def story(self, rule: Rule) -> tuple[Ends, Ends]:
        """Two engines come, send once, send again, are told to stop, and go; the rule strikes on the way.

        They share a node where the rule strikes what carries within one.
        Returns how the first transfer ended, and how the second, which D cancels while bytes are under way.
        """
        # So that a write is still under way when D cancels.
        slow = Rule("*.completion", Act.DELAY, times=None, seconds=0.3, node="p")
        broken = Rule("peer.send.Beat", Act.FAIL, node="d")
        # Only the way of a write that nothing is heard of is cut.
        lost = Rule("nixl.completion", Act.DROP, node="p")
        silent = [lost] if rule.point.endswith("cut_outlet") else []
        if rule.point == "notice.send.Bell":  # only one that was not heard is rung again
            silent.append(Rule("notice.recv.Bell", Act.DROP))
        again = [broken] if rule.point.endswith("PeerHello") and self.d.status().held.links else []
        self.board.set([*again, *silent, rule, slow])
        for one in again:
            eventually(partial(self.struck, one))
        if rule.point.endswith("MoverReady"):
            os.kill(self.p.mover_pid, signal.SIGKILL)
        with ExitStack() as stack, self._lifted(rule, slow):
            p, d = self._engines(stack, rule)
            # A mover that says nothing as it starts is given up after 30 s.
            eventually(lambda: p.ready() and d.ready(), timeout=60)
            first = self._first(p, d)
            eventually(lambda: p.ready() and d.ready())
            second = self._second(p, d)
            self._asides(p, d)
            if rule.point.endswith(("Draining", "StopMover")):
                self.p.stop()
                self.p.start()
        eventually(lambda: self.struck(rule))
        self.board.clear()
        for node in (self.p, self.d):
            eventually(partial(self._left, node), lambda left: not left)
        return first, second

    def struck(self, rule: Rule) -> bool:
        """Whether it has."""
        return any(firing.rule == rule.id for firing in self.board.record)

    def works(self, rule: Rule) -> None:
        """After that, new engines' KV moves. At the second try where the first shows what nobody had noticed:
        that a mover still owed an answer, and is replaced, or that a message on a link was lost."""
        with ExitStack() as stack:
            p, d = self._engines(stack, rule)
            eventually(lambda: p.ready() and d.ready())
            before = self._replaced()
            try:
                transfer(p, d)
            except AssertionError:
                eventually(self._replaced, lambda replaced: replaced > before)
                eventually(lambda: all(node.http("/readyz")[0] == 200 for node in (self.p, self.d)))
                eventually(lambda: p.ready() and d.ready())
                transfer(p, d)
        for node in (self.p, self.d):
            eventually(partial(self._left, node), lambda left: not left)

    def _replaced(self) -> float:
        """How many movers and links of both nodes had to be, so far."""
        nodes = (self.p, self.d)
        movers = sum(mover.restarts for node in nodes for mover in node.status().movers)
        return movers + sum(node.metric("kvpush_links_down_total") for node in nodes)

    def _engines(self, stack: ExitStack, rule: Rule) -> tuple[Engine, Engine]:
        other = self.p if rule.point.startswith("local.") else self.d
        return self._engine(stack, self.p), self._engine(stack, other)

    def _left(self, node: Node) -> object:
        try:
            return leftovers(node)
        except (grpc.RpcError, IndexError) as error:  # no mover at the moment, say
            return error

    def _engine(self, stack: ExitStack, node: Node) -> Engine:
        engine = Engine(node, f"{node.name}-{next(_names)}", board=self.board)
        stack.callback(engine.close)
        engine.begin()
        return engine

    @contextmanager
    def _lifted(self, rule: Rule, slow: Rule) -> Iterator[None]:
        """Takes a hang away, some time after it has struck; what is slow stays so."""
        over = threading.Event()

        def lift() -> None:
            while not self.struck(rule):
                if over.wait(0.01):
                    return
            if not over.wait(HANGS[rule.point.partition(".")[0]]):
                self.board.set([slow])

        thread = threading.Thread(target=lift)
        if rule.act is Act.HANG:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if rule.act is Act.HANG:
                thread.join()

    def _first(self, p: Engine, d: Engine) -> Ends:
        key = new_key()
        p.fill(IDS, 5)
        d.reserve(key, p, TARGETS, END)
        p.hand_off(key, IDS, END)
        p.advance(key, END)
        ended = self._ends(p, d, key)
        if ended[0] is None:
            assert_same(p, IDS, d, TARGETS, END)
        return ended

    def _second(self, p: Engine, d: Engine) -> Ends:
        key = new_key()
        d.reserve(key, p, TARGETS, END)
        p.hand_off(key, IDS)
        p.advance(key, END)
        deadline = time.monotonic() + LEASE
        while time.monotonic() < deadline and not self.p.status().held.writes:
            if any(isinstance(event, ReservationEnded) for event in d.heard):
                break
            time.sleep(0.005)
        d.scheduler.cancel(key, Side.RECEIVER, "the client left")
        # What P has of it that nobody told about it is P's to end.
        deadline = time.monotonic() + LEASE
        while time.monotonic() < deadline and not any(isinstance(e, HandoffEnded) for e in p.heard):
            time.sleep(0.005)
        p.scheduler.cancel(key, Side.SENDER, "the client left")
        return self._ends(p, d, key)

    def _asides(self, p: Engine, d: Engine) -> None:
        """What is said beside a transfer; and of what can't be, the one answer."""
        d.scheduler.first_token(new_key())
        d.scheduler.decline(new_key(), [p.address])
        wrong = new_key()
        p.hand_off(wrong, [1 << 20])
        answers = (Rejected, HandoffEnded)
        p.wait_until(lambda event: isinstance(event, answers) and event.key == wrong)

    def _ends(self, p: Engine, d: Engine, key: TransferKey) -> Ends:
        end = d.wait_for(ReservationEnded, key)
        if not end.released:
            d.wait_for(ReservationReleased, key)
        handoff = p.wait_for(HandoffEnded, key)
        twice = [e for e in (*p.heard, *d.heard) if isinstance(e, ReservationEnded | HandoffEnded)]
        assert not twice, "each half ends once"
        return (
            end.fault.reason if end.fault is not None else None,
            handoff.fault.reason if handoff.fault is not None else None,
        )
