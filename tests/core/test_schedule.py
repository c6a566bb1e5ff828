# SPDX-License-Identifier: Apache-2.0
"""Whose bytes go next, and how many at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvpushd.core.ranked import Ranked
from kvpushd.core.schedule import PATIENCE, Candidate, Schedule
from kvpushd.core.words import SECOND, LinkId

A, B = LinkId("a"), LinkId("b")
MIB = 1 << 20


def wants(
    what: str,
    remaining: int,
    *,
    whole: int | None = None,
    size: int = 1,
    link: LinkId = A,
    priority: int = 0,
    since: int = 0,
) -> Candidate[str]:
    whole = remaining if whole is None else whole
    return Candidate(what, link, priority, remaining, whole, since, size)


class Links:
    """What is in flight: on each at most `flight` bytes, or one write."""

    def __init__(self, flight: int) -> None:
        self._flight = flight
        self._in_flight: Counter[LinkId] = Counter()

    def room(self, link: LinkId, size: int) -> bool:
        return not self._in_flight[link] or self._in_flight[link] + size <= self._flight

    def post(self, link: LinkId, size: int) -> None:
        self._in_flight[link] += size

    def end(self, link: LinkId, size: int) -> None:
        self._in_flight[link] -= size


def carries(rate: int) -> Callable[[LinkId], float]:
    """The same for every link."""
    return lambda link: rate


def order(schedule: Schedule[str]) -> list[str]:
    """Pops until it says no, without anything in flight."""
    return [candidate.what for candidate in iter(schedule.pop, None)]


def test_the_shortest_goes_first() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    for what, remaining in (("long", 8000), ("short", 300), ("middle", 1000)):
        schedule.offer(wants(what, remaining))
    assert order(schedule) == ["short", "middle", "long"]


def test_a_short_one_goes_before_a_long_one_that_is_nearly_through_and_after_one_like_itself() -> None:
    schedule: Schedule[str] = Schedule(Links(100).room, carries(MIB))
    for what, remaining, whole in (("new", 300, 300), ("long", 200, 8000), ("begun", 200, 400)):
        schedule.offer(wants(what, remaining, whole=whole))
    assert order(schedule) == ["begun", "new", "long"]


def test_a_larger_priority_goes_before_a_shorter_one() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    schedule.offer(wants("short", 1))
    schedule.offer(wants("important", 9000, priority=1))
    assert order(schedule) == ["important", "short"]


def test_a_transfer_that_has_waited_long_goes_before_a_shorter_one_that_came_now() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(PATIENCE * 256 * MIB))
    schedule.offer(wants("old and long", 1024 * MIB, since=0))
    schedule.offer(wants("new and short", 1, since=5 * SECOND))
    assert order(schedule) == ["old and long", "new and short"]


def test_who_has_waited_long_is_known_as_soon_as_the_links_rate_is() -> None:
    rates = {A: 0.0, B: 0.0}
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, rates.__getitem__)
    links.post(A, 100)
    links.post(B, 100)
    for link in (A, B):
        schedule.offer(wants(f"old and long on {link}", 1024 * MIB, since=0, link=link))
        schedule.offer(wants(f"new and short on {link}", 1, since=5 * SECOND, link=link))
    rates[A] = PATIENCE * 256.0 * MIB
    for link in (A, B):
        links.end(link, 100)
        schedule.ended(link)
    assert order(schedule) == [
        *(f"{what} on a" for what in ("old and long", "new and short")),
        *(f"{what} on b" for what in ("new and short", "old and long")),
    ]


def test_an_idle_link_takes_a_write_of_any_size() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    schedule.offer(wants("large", 5000, size=5000))
    assert schedule.pop() is not None


def test_a_busy_link_takes_what_has_room_and_the_first_in_line_is_not_overtaken() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    links.post(A, 60)
    schedule.offer(wants("first", 50, size=50))
    schedule.offer(wants("second", 60, size=10))
    assert schedule.pop() is None
    links.end(A, 60)
    schedule.ended(A)
    first = schedule.pop()
    assert first is not None
    assert first.what == "first"


def test_one_overtakes_another_that_would_go_on() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    links.post(A, 1)
    turns = []
    for what, remaining in (("long", 9000), ("long", 8000), ("short", 10), ("long", 7000)):
        schedule.offer(wants("long", 8000))
        schedule.offer(wants(what, remaining))
        found = schedule.pop()
        assert found is not None
        turns.append((found.what, found.overtakes))
    assert turns == [("long", False), ("long", False), ("short", True), ("long", False)]


def test_links_do_not_wait_for_one_another() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    links.post(A, 100)
    schedule.offer(wants("here", 1))
    schedule.offer(wants("there", 9000, link=B))
    assert order(schedule) == ["there"]


def test_what_is_withdrawn_has_no_turn_and_what_is_offered_anew_has_one() -> None:
    links = Links(100)
    schedule: Schedule[str] = Schedule(links.room, carries(MIB))
    schedule.offer(wants("gone", 1))
    schedule.offer(wants("changed", 2))
    schedule.offer(wants("changed", 3, size=7))
    schedule.withdraw("gone")
    schedule.withdraw("never there")
    assert [schedule.waits_for(what) for what in ("gone", "changed", "never there")] == [0, 7, 0]
    (only,) = iter(schedule.pop, None)
    assert (only.what, only.size) == ("changed", 7)
    assert len(schedule) == schedule.waits_for("changed") == 0


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    cap=st.integers(1, 300),
    seed=st.integers(0, 1 << 32),
)
def test_no_link_has_more_in_flight_than_it_may_and_none_is_idle_while_something_waits(
    sizes: list[int], cap: int, seed: int
) -> None:
    random = Random(seed)
    links = Links(cap)
    schedule: Schedule[int] = Schedule(links.room, carries(MIB))
    waiting = dict(enumerate(sizes))
    link_of = {what: random.choice([A, B]) for what in waiting}
    flying: list[tuple[LinkId, int]] = []
    for what, size in waiting.items():
        schedule.offer(Candidate(what, link_of[what], 0, size, size, 0, size))
    while waiting or flying:
        for candidate in iter(schedule.pop, None):
            links.post(candidate.link, candidate.size)
            flying.append((candidate.link, candidate.size))
            assert waiting.pop(candidate.what) == candidate.size
        for link in (A, B):
            mine = [size for where, size in flying if where == link]
            assert sum(mine) <= cap or len(mine) == 1
            assert mine or not any(link_of[what] == link for what in waiting)
        link, size = flying.pop(random.randrange(len(flying)))
        links.end(link, size)
        schedule.ended(link)


def test_nothing_starves_behind_short_transfers_that_keep_coming() -> None:
    # The link carries 100 MiB a second; each moment brings a short transfer that fills it alone. What takes
    # 0.4 seconds has waited long after 26.
    links = Links(10 * MIB)
    schedule: Schedule[str] = Schedule(links.room, carries(100 * MIB))
    left, ended_at, came = 40 * MIB, None, Counter[str]()
    schedule.offer(wants("long", left, whole=40 * MIB, size=10 * MIB))
    flying: deque[Candidate[str]] = deque()
    for moment in range(400):
        now = moment * SECOND // 10
        schedule.offer(wants(f"short {moment}", 10 * MIB, size=10 * MIB, since=now))
        while (candidate := schedule.pop()) is not None:
            links.post(candidate.link, candidate.size)
            flying.append(candidate)
        done = flying.popleft()
        links.end(done.link, done.size)
        schedule.ended(done.link)
        came[done.what.split()[0]] += 1
        if done.what == "long":
            left -= done.size
            if left:
                schedule.offer(wants("long", left, whole=40 * MIB, size=10 * MIB))
            elif ended_at is None:
                ended_at = now
    assert came["short"] > came["long"] == 4
    assert ended_at is not None
    assert ended_at < 27 * SECOND


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 20)), max_size=200))
def test_ranked_keys_come_in_the_order_of_their_last_ranks(puts: list[tuple[int, int | None]]) -> None:
    ranked: Ranked[int] = Ranked()
    ranks: dict[int, int] = {}
    for key, rank in puts:
        if rank is None:
            ranked.drop(key)
            ranks.pop(key, None)
        else:
            ranked.put(key, rank)
            ranks[key] = rank
        assert len(ranked) == len(ranks)
        assert all(key in ranked for key in ranks)
        first = ranked.first()
        assert (first is None) == (not ranks)
        assert first is None or first[1] == min(ranks.values()) == ranks[first[0]]
    assert ranked.pop_until(-1) is None
    popped = [ranks[key] for key in iter(lambda: ranked.pop_until(20), None)]
    assert popped == sorted(ranks.values())
