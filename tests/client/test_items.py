# SPDX-License-Identifier: Apache-2.0
"""Fewer items that say the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpush_client.events import Side, TransferKey
from kvpush_client.items import Advance, Cancel, Item, merged

LAYERS = 4
ONE, TWO = TransferKey(b"1" * 16), TransferKey(b"2" * 16)

layers = st.integers(0, LAYERS - 1).flatmap(
    lambda first: st.tuples(st.just(first), st.sampled_from([*range(first + 1, LAYERS + 1), None]))
)
advances = st.builds(
    lambda key, positions, layers, at: Advance(key, positions, *layers, at),
    st.sampled_from([ONE, TWO]),
    st.integers(0, 3),
    layers,
    st.integers(0, 9),
)


def final(items: list[Item]) -> dict[TransferKey, list[int]]:
    """For each layer of each handoff, one past the last final position, once all this is said."""
    found = {key: np.zeros(LAYERS, int) for key in (ONE, TWO)}
    for item in items:
        if isinstance(item, Advance):
            of = found[item.key][item.first_layer : item.end_layer]
            np.maximum(of, item.positions, out=of)
    return {key: each.tolist() for key, each in found.items()}


@given(st.lists(advances, max_size=12))
def test_what_is_merged_says_the_same(items: list[Item]) -> None:
    assert final(merged(items)) == final(items)
    assert len(merged(items)) <= len(items)


def test_a_forward_that_nobody_heard_of_yet_is_one_item_that_was_said_when_it_ended() -> None:
    parts = [
        Advance(key, 7, first, first + 1, at) for at, first in enumerate(range(LAYERS)) for key in (ONE, TWO)
    ]
    assert merged(parts) == [Advance(ONE, 7, 0, LAYERS, 3), Advance(TWO, 7, 0, LAYERS, 3)]
    assert merged([*parts, Advance(ONE, 9, 0, None, 5)]) == [
        Advance(ONE, 9, 0, None, 5),
        Advance(TWO, 7, 0, LAYERS, 3),
    ]


def test_what_does_not_go_on_where_the_last_ended_stays_and_so_do_other_items() -> None:
    items = [
        Advance(ONE, 7, 0, 1),
        Cancel(ONE, Side.SENDER),
        Advance(ONE, 7, 2, 3),
        Advance(ONE, 8, 3, 4),
        Advance(ONE, 6, 0, None),
    ]
    assert merged(items) == items
