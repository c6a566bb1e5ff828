# SPDX-License-Identifier: Apache-2.0
"""The halves that a session opened, and what its engine has heard of each.

A half is live from its opening until the engine has polled its end: an end that waits in the queue must
not let a late append open the half anew, for the engine would then hear two ends of what it holds to be one.

Pure bookkeeping: no threads, no clock, no I/O. The session calls it under its lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvpush_client.events import (
    Draining,
    Fault,
    HandoffEnded,
    Matched,
    Reason,
    Rejected,
    ReservationEnded,
    ReservationReleased,
    Side,
    TransferKey,
)
from kvpush_client.items import Cancel

Heard = Matched | ReservationEnded | ReservationReleased | HandoffEnded | Rejected | Draining
End = ReservationEnded | ReservationReleased | HandoffEnded


class _State(Enum):
    OPEN = auto()
    QUARANTINED = auto()  # a reservation that ended; the daemon still owes its release
    UNFENCED = auto()  # its daemon was lost; the fence owes its last event
    OVER = auto()  # its last event is out, but not yet polled


@dataclass(slots=True)
class _Half:
    generation: int
    state: _State = _State.OPEN
    handoffs: int = 1
    """Handoff items sent: the one that opened it, and appends."""
    rejections: int = 0
    fault: Fault | None = None
    """Why it can't end well, once that is known."""


class Halves:
    """Turns what the daemon says, and its loss, into exactly one end per half.

    A generation is one connection: 1, 2, ... The halves of a generation are lost together, and fenced
    together, each generation by itself: see Fences.
    """

    def __init__(self) -> None:
        self._halves: dict[tuple[TransferKey, Side], _Half] = {}

    def __len__(self) -> int:
        return len(self._halves)

    def reserve(self, key: TransferKey, generation: int) -> bool:
        """Opens a reservation; False where one with this key is live already."""
        if (key, Side.RECEIVER) in self._halves:
            return False
        self._halves[key, Side.RECEIVER] = _Half(generation)
        return True

    def hand_off(self, key: TransferKey, generation: int) -> bool:
        """Opens a handoff or appends to it; False where it is past that, and nothing is to be sent."""
        half = self._halves.get((key, Side.SENDER))
        if half is None:
            self._halves[key, Side.SENDER] = _Half(generation)
            return True
        if half.state is not _State.OPEN or half.fault is not None:
            return False
        half.handoffs += 1
        return True

    @staticmethod
    def duplicate(key: TransferKey) -> Rejected:
        """The answer to a reservation whose key has a live one."""
        fault = Fault(Reason.DUPLICATE, f"a reservation with key {key} is live")
        return Rejected(key, Side.RECEIVER, fault)

    def refuse(self, key: TransferKey, side: Side, fault: Fault) -> End | None:
        """The end of a half that can't be opened; None where one with this key is live: it ends by itself."""
        if (key, side) in self._halves:
            return None
        self._halves[key, side] = _Half(generation=0, state=_State.OVER)
        return _end_of_nothing(key, side, fault)

    def is_open(self, key: TransferKey, side: Side) -> bool:
        """The half is open, so that taking it back means something."""
        half = self._halves.get((key, side))
        return half is not None and half.state is _State.OPEN

    def heard(self, event: Heard) -> Heard | Cancel | None:
        """What becomes of an event of the daemon: the event to pass on, an item to send, or nothing.

        Events of halves that aren't open are dropped: they are late or doubled.
        """
        match event:
            case Draining():
                return event
            case Matched():
                return event if self.is_open(event.key, event.side) else None
            case ReservationEnded():
                half = self._live(event.key, Side.RECEIVER, _State.OPEN)
                if half is None:
                    return None
                half.state = _State.OVER if event.released else _State.QUARANTINED
                return event
            case ReservationReleased():
                half = self._live(event.key, Side.RECEIVER, _State.QUARANTINED)
                if half is None:
                    return None
                half.state = _State.OVER
                return event
            case HandoffEnded():
                half = self._live(event.key, Side.SENDER, _State.OPEN)
                if half is None:
                    return None
                half.state = _State.OVER
                return event if half.fault is None else HandoffEnded(event.key, half.fault, event.counts)
            case Rejected():
                return self._rejected(event)

    def _rejected(self, event: Rejected) -> End | Cancel | None:
        half = self._live(event.key, event.side, _State.OPEN)
        if half is None:
            return None
        # Nothing changed by the item, so if it was the only one, there is no half at the daemon.
        half.rejections += 1
        if half.rejections == half.handoffs:
            half.state = _State.OVER
            return _end_of_nothing(event.key, event.side, half.fault or event.fault)
        # Some blocks of the handoff are known there and some are not: it can't end well, but it may be being
        # read. It is taken back, and ends when the daemon says so.
        if half.fault is not None:
            return None
        half.fault = event.fault
        return Cancel(event.key, event.side, str(event.fault))

    def lost(self, generation: int, fault: Fault) -> list[ReservationEnded]:
        """The connection is gone. Reservations end at once; blocks and handoffs wait for the fence."""
        ends = []
        for (key, side), half in self._halves.items():
            if half.generation != generation or half.state is _State.OVER:
                continue
            if half.state is _State.OPEN:
                half.fault = half.fault or fault
                if side is Side.RECEIVER:
                    ends.append(ReservationEnded(key, half.fault, released=False))
            half.state = _State.UNFENCED
        return ends

    def fenced(self, generation: int) -> list[End]:
        """Nothing of this connection's daemon reads or writes any more: the last events."""
        ends: list[End] = []
        for (key, side), half in self._halves.items():
            if half.state is _State.UNFENCED and half.generation == generation:
                half.state = _State.OVER
                released = side is Side.RECEIVER
                ends.append(ReservationReleased(key) if released else HandoffEnded(key, half.fault))
        return ends

    def polled(self, event: object) -> None:
        """The engine has it. After a half's last event its key is free."""
        match event:
            case ReservationEnded(key=key, released=True) | ReservationReleased(key=key):
                self._halves.pop((key, Side.RECEIVER), None)  # a worker hears of halves that it never opened
            case HandoffEnded(key=key):
                self._halves.pop((key, Side.SENDER), None)
            case _:
                pass

    def _live(self, key: TransferKey, side: Side, state: _State) -> _Half | None:
        half = self._halves.get((key, side))
        return half if half is not None and half.state is state else None


def _end_of_nothing(key: TransferKey, side: Side, fault: Fault) -> End:
    return ReservationEnded(key, fault, released=True) if side is Side.RECEIVER else HandoffEnded(key, fault)
