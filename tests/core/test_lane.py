# SPDX-License-Identifier: Apache-2.0
"""Windows of a lane: each (layer, position) once, never before it is final and named."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvpushd.core.lane import Frontier, Lane, Pair
from kvpushd.core.layout import Window


def lane(
    layers: tuple[int, ...] = (0, 1),
    unit: int = 1,
    start: int = 0,
    end: int = 10,
    size: int = 4,
    whole: int | None = None,
) -> Lane:
    """A lane of `size` bytes per position and layer."""
    return Lane(Pair(0, 0, layers, frozenset({0}), unit, whole or unit, size * len(layers)), start, end)


def final(*positions: int) -> Frontier:
    return Frontier(list(positions))


@dataclass(frozen=True, slots=True)
class Advance:
    positions: int
    first_layer: int
    end_layer: int | None
    named: int


advances = st.lists(
    st.builds(
        Advance, st.integers(0, 70), st.integers(0, 5), st.none() | st.integers(0, 9), st.integers(0, 70)
    ),
    max_size=12,
)


@given(
    layers=st.sets(st.integers(0, 5), min_size=1).map(lambda s: tuple(sorted(s))),
    unit=st.sampled_from([1, 4, 16]),
    first=st.integers(0, 2),
    length=st.integers(1, 40),
    most=st.integers(1, 400),
    advances=advances,
)
def test_windows_are_disjoint_lie_inside_the_frontier_and_come_to_cover_everything(
    layers: tuple[int, ...], unit: int, first: int, length: int, most: int, advances: list[Advance]
) -> None:
    start, end = first * unit, first * unit + length
    subject, frontier, named = lane(layers, unit, start, end), Frontier.at_start(6), 0
    covered: set[tuple[int, int]] = set()

    def take_all() -> None:
        while (window := subject.next_window(frontier, named, most)) is not None:
            mine = [layer for layer in layers if window.first_layer <= layer < window.end_layer]
            cells = {(layer, p) for layer in mine for p in range(window.start, window.end)}
            assert cells
            assert not cells & covered, "disjoint"
            assert window.start % unit == 0, "begins where a layer can be cut"
            assert window.end % unit == 0 or window.end == end, "ends there, or with the transfer"
            assert start <= window.start < window.end <= end
            for layer in mine:
                assert window.end <= min(frontier.final[layer], named), "inside the frontier"
            size = subject.bytes_of(window)
            assert size == 4 * len(cells)
            assert size <= max(most, 4 * unit * len(mine)), "of the size that was asked for, or one unit"
            covered.update(cells)
            subject.post(window)
            assert subject.remaining == 4 * (len(layers) * (end - start) - len(covered))

    for advance in advances:
        frontier.advance(advance.positions, advance.first_layer, advance.end_layer)
        named = max(named, advance.named)
        take_all()
        for layer in layers:
            reached = min(frontier.final[layer], named, end)
            reached = end if reached == end else max(start, reached - reached % unit)
            assert all((layer, p) in covered for p in range(start, reached)), "nothing that may move waits"
    frontier.advance(end, 0, None)
    named = end
    take_all()
    assert covered == {(layer, p) for layer in layers for p in range(start, end)}, "covers everything"
    assert not subject.done, "as long as a write is under way"
    subject.in_flight = 0
    assert subject.done


def test_a_whole_step_is_one_window() -> None:
    assert lane().next_window(final(7, 7), 8, 1000) == Window(0, 7, 0, 2)


def test_many_chunks_become_one_window_and_a_long_one_is_cut() -> None:
    subject = lane(end=100)
    window = subject.next_window(final(90, 90), 96, 8 * 64)
    assert window == Window(0, 64, 0, 2)
    subject.post(window)
    assert subject.next_window(final(100, 100), 100, 8 * 64) == Window(64, 100, 0, 2)


def test_a_layer_that_is_ahead_moves_on_its_own() -> None:
    assert lane().next_window(final(7, 0), 8, 1000) == Window(0, 7, 0, 1)


def test_positions_whose_blocks_are_not_named_wait() -> None:
    assert lane().next_window(final(7, 7), 4, 1000) == Window(0, 4, 0, 2)


def test_the_last_block_of_a_packed_layer_moves_as_soon_as_what_is_wanted_of_it_is_final() -> None:
    subject = lane(unit=4, end=6)
    assert subject.next_window(final(5, 5), 8, 1000) == Window(0, 4, 0, 2)
    assert subject.next_window(final(6, 6), 8, 1000) == Window(0, 6, 0, 2)


def test_layers_that_only_one_side_has_are_not_waited_for() -> None:
    subject = lane(layers=(0, 2), end=4)
    assert subject.next_window(final(4, 0, 4), 4, 1000) == Window(0, 4, 0, 3)


def test_a_frontier_only_grows_and_nothing_outside_of_it_is_touched() -> None:
    frontier = Frontier.at_start(2)
    frontier.advance(5, 0, None)
    frontier.advance(3, 0, None)
    frontier.advance(9, -1, 1)
    frontier.advance(9, 7, 99)
    assert frontier.final == [9, 5]
    assert frontier.everywhere == 5


def test_a_new_attempt_writes_everything_again() -> None:
    subject = lane()
    window = subject.next_window(final(10, 10), 12, 1000)
    assert window is not None
    subject.post(window)
    subject.restart()
    assert subject.next_window(final(10, 10), 12, 1000) == window


def test_a_window_that_may_hold_a_whole_block_splits_none() -> None:
    subject = lane(start=3, end=100, whole=16, size=4)
    ends = []
    while (window := subject.next_window(final(100, 100), 100, most_bytes=8 * 40)) is not None:
        subject.post(window)
        ends.append(window.end)
    assert ends == [32, 64, 96, 100]


def test_a_window_that_is_too_small_for_a_block_takes_what_it_may() -> None:
    subject = lane(start=0, end=100, whole=64, size=4)
    window = subject.next_window(final(100, 100), 100, most_bytes=8 * 10)
    assert window == Window(0, 10, 0, 2)
