# SPDX-License-Identifier: Apache-2.0
"""One end per half, whatever the daemon says and whenever it is lost."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpush_client.events import (
    Counts,
    Event,
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
from kvpush_client.halves import Halves
from kvpush_client.items import Cancel

KEY = TransferKey(bytes(16))
GONE = Fault(Reason.PEER_UNREACHABLE, "gone")
WRONG = Fault(Reason.INVALID, "wrong")


def test_an_append_after_an_end_that_is_not_polled_yet_opens_nothing() -> None:
    halves = Halves()
    halves.hand_off(KEY, 1)
    end = halves.heard(HandoffEnded(KEY, None))
    assert not halves.hand_off(KEY, 1)
    halves.polled(end)
    assert halves.hand_off(KEY, 1)


def test_a_lifeline_that_ends_late_fences_nothing_of_a_later_connection() -> None:
    halves = Halves()
    halves.reserve(KEY, 2)
    halves.lost(2, GONE)
    assert halves.fenced(1) == []
    assert halves.fenced(2) == [ReservationReleased(KEY)]


def test_a_fence_is_for_one_connection_and_for_none_before_it() -> None:
    halves = Halves()
    halves.reserve(KEY, 1)
    halves.lost(1, GONE)
    assert halves.fenced(2) == []
    assert halves.fenced(1) == [ReservationReleased(KEY)]


def test_both_ways_to_a_fence_release_once() -> None:
    halves = Halves()
    halves.hand_off(KEY, 1)
    assert halves.lost(1, GONE) == []
    assert halves.fenced(1) == [HandoffEnded(KEY, GONE)]
    assert halves.fenced(1) == []


def test_a_reservation_that_waits_for_its_release_when_the_daemon_is_lost_is_released_by_the_fence() -> None:
    halves = Halves()
    halves.reserve(KEY, 1)
    halves.heard(ReservationEnded(KEY, GONE, released=False))
    assert halves.lost(1, GONE) == []
    assert halves.fenced(1) == [ReservationReleased(KEY)]


def test_a_rejected_opening_ends_the_half() -> None:
    halves = Halves()
    halves.reserve(KEY, 1)
    rejected = Rejected(KEY, Side.RECEIVER, WRONG)
    assert halves.heard(rejected) == ReservationEnded(KEY, WRONG, released=True)
    assert halves.heard(rejected) is None


def test_a_handoff_with_a_rejected_part_is_cancelled_once_and_keeps_the_reason() -> None:
    halves = Halves()
    for _ in range(3):
        halves.hand_off(KEY, 1)
    rejected = Rejected(KEY, Side.SENDER, WRONG)
    assert halves.heard(rejected) == Cancel(KEY, Side.SENDER, str(WRONG))
    assert halves.heard(rejected) is None
    assert not halves.hand_off(KEY, 1)
    ended = HandoffEnded(KEY, Fault(Reason.CANCELLED, ""), Counts(bytes=7))
    assert halves.heard(ended) == HandoffEnded(KEY, WRONG, Counts(bytes=7))


def test_a_handoff_of_which_every_part_is_rejected_ends_without_the_daemons_word() -> None:
    halves = Halves()
    halves.hand_off(KEY, 1)
    halves.hand_off(KEY, 1)
    rejected = Rejected(KEY, Side.SENDER, WRONG)
    assert isinstance(halves.heard(rejected), Cancel)
    assert halves.heard(rejected) == HandoffEnded(KEY, WRONG)


KEYS = st.integers(0, 2).map(lambda n: TransferKey(bytes([n]) * 16))
SIDES = st.sampled_from(Side)
FAULTS = st.sampled_from([None, Fault(Reason.EXPIRED, "")])


class AnyDaemon(RuleBasedStateMachine):
    """A daemon that says anything, in any order, and is lost at any time.

    Seen is what the engine has polled. Opened counts the halves that it believes to have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.generation = 1
        self.queue: deque[Event] = deque()
        self.believed: set[tuple[TransferKey, Side]] = set()
        self.opened: Counter[tuple[TransferKey, Side]] = Counter()
        self.waiting: set[TransferKey] = set()  # reservations that ended unreleased
        self.ended: Counter[tuple[TransferKey, Side]] = Counter()

    def believe(self, key: TransferKey, side: Side) -> None:
        if (key, side) not in self.believed:
            self.believed.add((key, side))
            self.opened[key, side] += 1

    @rule(key=KEYS)
    def reserve(self, key: TransferKey) -> None:
        if self.halves.reserve(key, self.generation):
            self.believe(key, Side.RECEIVER)

    @rule(key=KEYS)
    def hand_off(self, key: TransferKey) -> None:
        self.believe(key, Side.SENDER)
        self.halves.hand_off(key, self.generation)

    @rule(key=KEYS, side=SIDES)
    def refuse(self, key: TransferKey, side: Side) -> None:
        end = self.halves.refuse(key, side, GONE)
        if end is not None:
            self.believe(key, side)
            self.queue.append(end)

    @rule(key=KEYS, fault=FAULTS, released=st.booleans())
    def say_reservation_ended(self, key: TransferKey, fault: Fault | None, released: bool) -> None:
        self.hear(ReservationEnded(key, fault, released))

    @rule(key=KEYS)
    def say_released(self, key: TransferKey) -> None:
        self.hear(ReservationReleased(key))

    @rule(key=KEYS, fault=FAULTS)
    def say_handoff_ended(self, key: TransferKey, fault: Fault | None) -> None:
        self.hear(HandoffEnded(key, fault))

    @rule(key=KEYS, side=SIDES)
    def say_rejected(self, key: TransferKey, side: Side) -> None:
        self.hear(Rejected(key, side, WRONG))

    @rule(key=KEYS, side=SIDES)
    def say_matched(self, key: TransferKey, side: Side) -> None:
        self.hear(Matched(key, side))

    def hear(self, event: Matched | ReservationEnded | ReservationReleased | HandoffEnded | Rejected) -> None:
        heard = self.halves.heard(event)
        if heard is not None and not isinstance(heard, Cancel):
            self.queue.append(heard)

    @rule()
    def lose(self) -> None:
        self.queue.extend(self.halves.lost(self.generation, GONE))
        self.generation += 1

    @rule(age=st.integers(0, 2))
    def fence(self, age: int) -> None:
        self.queue.extend(self.halves.fenced(self.generation - age))

    @rule()
    def poll(self) -> None:
        while self.queue:
            event = self.queue.popleft()
            self.halves.polled(event)
            match event:
                case ReservationEnded(key=key):
                    assert key not in self.waiting
                    self.end(key, Side.RECEIVER) if event.released else self.waiting.add(key)
                case ReservationReleased(key=key):
                    self.waiting.remove(key)
                    self.end(key, Side.RECEIVER)
                case HandoffEnded(key=key):
                    self.end(key, Side.SENDER)
                case Matched(key=key, side=side):
                    assert (key, side) in self.believed
                case _:
                    raise AssertionError(f"an engine is never told {event}")

    def end(self, key: TransferKey, side: Side) -> None:
        self.believed.remove((key, side))
        self.ended[key, side] += 1

    @invariant()
    def nothing_ends_that_was_not_opened(self) -> None:
        assert self.ended <= self.opened

    def teardown(self) -> None:
        self.lose()
        for age in range(self.generation):
            self.fence(age)
        self.poll()
        assert self.ended == self.opened
        assert not self.waiting
        assert len(self.halves) == 0


TestAnyDaemon = AnyDaemon.TestCase
TestAnyDaemon.settings = settings(stateful_step_count=40)
