# SPDX-License-Identifier: Apache-2.0
"""Asks: so many requests at a time, each checked against the reference as it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from testing.clockwork.harness import EngineFailed, Output, Request
from testing.engines import BLOCK, answer
from testing.soak.fleet import MORTAL_D, MORTAL_P, D, Fleet, P
from testing.soak.load import Ask

NEVER = 60.0
"""Seconds after which a request counts as lost."""
MORTAL_SHARE = 6
"""Of so many requests, one begins, and another ends, on an engine that is started anew."""


@dataclass(slots=True)
class Open:
    """A request in flight."""

    ask: Ask
    sender: str
    receiver: str
    transfer_id: bytes
    since: float
    p: Request | None = None
    d: Request | None = None
    left: bool = False


@dataclass(slots=True)
class Done:
    """How one ended: right, wrong, left by its client, or with its engine, which was killed."""

    number: int
    how: str
    external: int = 0
    local: int = 0
    owed: bool = False
    """Some of its prompt should have come from P."""


@dataclass(slots=True)
class Tally:
    """All that ended."""

    done: list[Done] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def share(self, part: list[Done]) -> dict[str, float]:
        """Of a part of them: how many are right of those that their client waited for, how many moved."""
        waited = [one for one in part if one.how in ("right", "wrong", "lost")]
        owed = [one for one in waited if one.owed]
        return {
            "requests": len(part),
            "right": sum(one.how == "right" for one in waited) / max(1, len(waited)),
            "moved": sum(one.external > 0 for one in owed) / max(1, len(owed)),
        }

    def counts(self) -> dict[str, int]:
        """By how they ended; and prefix hits."""
        return {
            **Counter(one.how for one in self.done),
            "prefix_hits": sum(one.local > 0 for one in self.done),
            "moved": sum(one.external > 0 for one in self.done),
        }


class Driver:
    """Keeps `most` requests in flight."""

    def __init__(self, fleet: Fleet, asks: Iterator[Ask], most: int) -> None:
        self._fleet = fleet
        self._asks = asks
        self._most = most
        self._open: list[Open] = []
        self.dead: str | None = None
        """The engine that is being started anew."""
        self.tally = Tally()

    def turn(self, *, more: bool = True) -> bool:
        """Takes ends, lets clients leave, asks for more; whether any is in flight."""
        for one in list(self._open):
            self._attend(one)
        while more and len(self._open) < self._most:
            self._begin(next(self._asks))
        return bool(self._open)

    def _begin(self, ask: Ask) -> None:
        turn = ask.number % MORTAL_SHARE
        sender = MORTAL_P if turn == 1 and self.dead != MORTAL_P else P
        receiver = MORTAL_D if turn == 0 and self.dead != MORTAL_D else D
        one = Open(ask, sender, receiver, self._fleet.new_transfer(), time.monotonic())
        self._open.append(one)
        if ask.d_first and not ask.in_turn:
            self._send_d(one)
        one.p = self._fleet.engines[sender].submit(ask.tokens, 1, self._fleet.params_for_p(one.transfer_id))
        if not ask.d_first and not ask.in_turn:
            self._send_d(one)

    def _send_d(self, one: Open) -> None:
        params = self._fleet.params_for_d(one.transfer_id, one.sender)
        try:
            engine = self._fleet.engines[one.receiver]
            one.d = engine.submit(one.ask.tokens, one.ask.count, params)
        except EngineFailed:  # the one that is started anew: P's leg waits for its lease, as in a fleet
            self._end(one, "engine killed")

    def _attend(self, one: Open) -> None:
        assert one.p is not None
        waited = time.monotonic() - one.since
        if one.ask.patience is not None and waited > one.ask.patience and not one.left:
            one.left = True
            if one.sender != self.dead:
                self._fleet.engines[one.sender].abort(one.p.request_id)
            if one.d is None:
                self._end(one, "left")
                return
            if one.receiver != self.dead:
                self._fleet.engines[one.receiver].abort(one.d.request_id)
        if one.d is None and one.p.done():
            self._send_d(one)
        elif one.d is not None and one.d.done() and one.p.done():
            self._judge(one)
        elif waited > NEVER:
            self._end(one, "lost")
            self.tally.wrong.append(f"request {one.ask.number} never ended on {one.receiver}")

    def _judge(self, one: Open) -> None:
        assert one.d is not None
        try:
            output = one.d.result(0)
        except EngineFailed:
            self._end(one, "engine killed")
            return
        if output.finish_reason == "abort" and one.left:
            self._end(one, "left", output)
        elif output.token_ids == answer(one.ask.tokens, one.ask.count):
            self._end(one, "right", output)
        else:
            self.tally.wrong.append(f"request {one.ask.number} on {one.receiver}: {output}")
            self._end(one, "wrong", output)

    def _end(self, one: Open, how: str, output: Output | None = None) -> None:
        if one in self._open:
            self._open.remove(one)
        external = (output.external_cached_tokens if output else 0) or 0
        local = (output.local_cached_tokens if output else 0) or 0
        owed = len(one.ask.tokens) - local > BLOCK
        self.tally.done.append(Done(one.ask.number, how, external, local, owed))
