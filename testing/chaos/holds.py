# SPDX-License-Identifier: Apache-2.0
"""How a transfer is brought into a phase and kept there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpush_client._proto import admin_pb2
from testing.chaos.scenario import Phase
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
class Sight:
    """What was seen of a transfer as it was held: bytes landed, writes in flight, and the phase."""

    phase: Phase
    bytes: int = 0
    writes: int = 0

    @property
    def trouble(self) -> str:
        """Why the phase does not count; empty where it does."""
        if self.phase.moved and not self.bytes:
            return f"no byte had landed while it was held in {self.phase.value!r}"
        if self.phase.writing and not self.writes:
            return f"no write was in flight while it was held in {self.phase.value!r}"
        return ""


@dataclass(slots=True)
class Held:
    """A transfer in its phase. `later` sends the leg that is missing; `others` are requests beside it."""

    legs: Legs
    sight: Sight
    later: Callable[[Legs], None] | None = None
    others: list[tuple[str, Request]] = field(default_factory=list)
    d_stopped: bool = False


class Holds:
    """Brings transfers into phases."""

    def __init__(self, stage: Stage, send_both: Callable[[Legs], None]) -> None:
        """`send_both` sends both legs at once, by whichever way."""
        self._stage = stage
        self._send_both = send_both

    def hold(self, phase: Phase, legs: Legs) -> Held:
        """Returns as soon as the transfer is in the phase. Raises TimeoutError where it never is."""
        held = Held(legs, Sight(phase))
        {
            Phase.UNRESERVED: self._unreserved,
            Phase.ANNOUNCED: self._announced,
            Phase.QUEUED: self._queued,
            Phase.BETWEEN: self._between,
            Phase.POSTING: self._posting,
            Phase.SEALED: self._sealed,
            Phase.LANDED: self._landed,
        }[phase](held)
        return held

    def _unreserved(self, held: Held) -> None:
        stage, legs = self._stage, held.legs
        stage.send_p(legs)
        assert legs.p is not None
        legs.p.result(REACH)
        self._until("P's handoff waits", held, "p", lambda t: t.half.phase == admin_pb2.PHASE_OPEN)
        held.later = stage.send_d

    def _announced(self, held: Held) -> None:
        stage = self._stage
        stage.send_d(held.legs)
        self._until("D has reserved", held, "d", lambda t: t.half.phase == admin_pb2.PHASE_OPEN)
        wait_for("the announcement is at P's node", lambda: self._is_announced(held), REACH)
        held.later = stage.send_p

    def _is_announced(self, held: Held) -> bool:
        request = admin_pb2.ListPeersRequest()
        peers = self._stage.nodes["p"].admin("ListPeers", request).peers
        return any(peer.up and not peer.receiving and peer.node == "d" for peer in peers)

    def _queued(self, held: Held) -> None:
        stage, legs = self._stage, held.legs
        stage.configure(p=CRAWL, sender=legs.sender)
        before = stage.engines[legs.sender].submit(prompt(1200, legs.transfer_id), 1)
        held.others.append((legs.sender, before))
        self._send_both(legs)
        self._until("both are matched", held, "d", lambda t: t.half.phase == admin_pb2.PHASE_MATCHED)

    def _between(self, held: Held) -> None:
        self._stage.configure(p=CRAWL, sender=held.legs.sender)
        self._send_both(held.legs)
        self._moving(held, lambda t, writes: not t.times.sealed_unix_ns and not writes)

    def _posting(self, held: Held) -> None:
        self._stage.link.shape(SLOW_LINK)
        self._stage.configure(p=WALK, sender=held.legs.sender)
        self._send_both(held.legs)
        self._moving(held, lambda t, writes: not t.times.sealed_unix_ns and writes > 0)

    def _sealed(self, held: Held) -> None:
        self._stage.link.shape(SLOW_LINK)
        self._send_both(held.legs)
        self._moving(held, lambda t, writes: t.times.sealed_unix_ns and writes > 0)

    def _landed(self, held: Held) -> None:
        stage = self._stage
        stage.configure(p=WALK, sender=held.legs.sender)
        self._send_both(held.legs)
        self._until("D has reserved", held, "d", lambda t: True)
        stage.engines[D].kill(signal.SIGSTOP)
        held.d_stopped = True
        stage.configure(p=FAST, sender=held.legs.sender)
        self._until("all has landed", held, "d", lambda t: t.half.phase == admin_pb2.PHASE_ENDED)

    def _moving(self, held: Held, wanted: Callable[[admin_pb2.Transfer, int], object]) -> None:
        def reached(transfer: admin_pb2.Transfer) -> bool:
            status = self._stage.status("p")
            writes = status.held.writes if status else 0
            held.sight.bytes, held.sight.writes = transfer.counts.bytes, writes
            moved = transfer.counts.bytes > 0 or not held.sight.phase.moved
            moving = transfer.half.phase == admin_pb2.PHASE_MOVING and moved
            return moving and not transfer.times.landed_unix_ns and bool(wanted(transfer, writes))

        self._until(f"it is {held.sight.phase.value}", held, "p", reached)

    def _until(
        self, what: str, held: Held, node: str, wanted: Callable[[admin_pb2.Transfer], object]
    ) -> None:
        def look() -> bool:
            transfer = self._stage.look(node, held.legs.transfer_id)
            return transfer is not None and bool(wanted(transfer))

        try:
            wait_for(what, look, REACH)
        except TimeoutError as error:
            seen = self._stage.look(node, held.legs.transfer_id)
            raise TimeoutError(f"{error}; {node} says: {' '.join(str(seen).split())[:400]}") from None
