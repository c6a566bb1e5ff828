# SPDX-License-Identifier: Apache-2.0
"""What both daemons list of a transfer, and whether that is the phase in which it is to be held."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush_client._proto import admin_pb2
from testing.chaos.scenario import Phase
from testing.clockwork.checkpoint import Geometry

OPEN, MATCHED, MOVING, FENCING, ENDED = (
    admin_pb2.PHASE_OPEN,
    admin_pb2.PHASE_MATCHED,
    admin_pb2.PHASE_MOVING,
    admin_pb2.PHASE_FENCING,
    admin_pb2.PHASE_ENDED,
)
OVER = (FENCING, ENDED)
WORDS = {OPEN: "open", MATCHED: "matched", MOVING: "moving", FENCING: "fencing", ENDED: "ended"}


@dataclass(slots=True)
class Sight:
    """One look at a transfer of so many `positions`."""

    phase: Phase
    positions: int = 0
    p: admin_pb2.Transfer | None = None
    """P's account; None = it lists none."""
    d: admin_pb2.Transfer | None = None
    writes: int = 0
    """In flight at P's node."""
    announced: int = 0
    """What P's node counts on its link from D's, the only transfer of which is this one."""
    alone: bool = True
    """Nothing else is written by P's node, so that all writes are this transfer's."""

    @property
    def bytes(self) -> int:
        """Landed, as P counts."""
        return int(self.p.counts.bytes) if self.p is not None else 0

    @property
    def missed(self) -> bool:
        """The phase will not be reached any more."""
        sides = [side for side in (self.p, self.d) if side is not None]
        if self.phase is Phase.LANDED:
            return any(side.HasField("fault") for side in sides)
        return any(side.half.phase in OVER for side in sides)

    @property
    def trouble(self) -> str:
        """Why this is not the phase; empty where it is."""
        wrong = [what for what, holds in self._signs() if not holds]
        return f"it is not {self.phase.value!r}: {', '.join(wrong)}; {self}" if wrong else ""

    def _signs(self) -> list[tuple[str, bool]]:
        p, d = self.p, self.d
        at_p, at_d = (None if side is None else side.half.phase for side in (p, d))
        match self.phase:
            case Phase.UNRESERVED:
                return [
                    ("P's handoff does not wait", at_p == OPEN),
                    ("P's prompt is not sealed", p is not None and p.half.end == self.positions),
                    ("D knows of it", d is None and not self.announced),
                ]
            case Phase.ANNOUNCED:
                return [
                    ("D's reservation does not wait", at_d == OPEN),
                    ("P's node was not told of it", self.announced == 1),
                    ("P has handed off", p is None),
                ]
            case Phase.QUEUED:
                return [
                    ("not both sides are matched", at_p == MATCHED and at_d == MATCHED),
                    ("P has posted", p is not None and not p.times.first_post_unix_ns),
                ]
            case Phase.LANDED:
                return [
                    ("not both sides have ended well", landed(p) and landed(d)),
                    ("not all bytes are there", d is not None and self.bytes == whole(d) == d.counts.bytes),
                    ("D has reserved another part", d is not None and d.half.end == self.positions - 1),
                    ("D's engine has seen it", d is not None and not d.first_token_unix_ns),
                ]
        # What is under way on a slow link may hold up D's word that it moves.
        signs = [("it does not move", at_p == MOVING and at_d in (MATCHED, MOVING))]
        if self.phase.moved:
            signs.append(("no byte has landed", self.bytes > 0))
        sealed = p is not None and p.times.sealed_unix_ns > 0
        signs.append(("the seal", sealed == (self.phase is Phase.SEALED)))
        signs.append(("all has landed", p is not None and not p.times.landed_unix_ns))
        # Where others write too, what is sealed and has not landed is, or waits for, a write in flight.
        if self.alone:
            signs.append(("writes in flight", bool(self.writes) == self.phase.writing))
        return signs

    def __str__(self) -> str:
        told = [f"{side} says {said(one)}" for side, one in (("P", self.p), ("D", self.d))]
        return f"{', '.join(told)}, {self.writes} writes in flight, {self.announced} announced"


def landed(side: admin_pb2.Transfer | None) -> bool:
    """Whether a node says that all has landed, and nothing went wrong."""
    if side is None or side.HasField("fault"):
        return False
    return side.half.phase == ENDED and side.times.landed_unix_ns > 0


def whole(side: admin_pb2.Transfer) -> int:
    """Bytes of all positions that D has reserved."""
    return int(side.half.end - side.half.start) * Geometry().bytes_per_token


def said(side: admin_pb2.Transfer | None) -> str:
    """A node's account, for people."""
    if side is None:
        return "nothing"
    fault = f" with {side.fault.detail!r}" if side.HasField("fault") else ""
    return f"{WORDS.get(side.half.phase, 'nothing known')}{fault} ({side.counts.bytes} bytes landed)"
