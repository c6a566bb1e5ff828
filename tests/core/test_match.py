# SPDX-License-Identifier: Apache-2.0
"""What of a reservation a handoff names, where a group has a sliding window."""

from __future__ import annotations

import numpy as np
import pytest

from kvpush_client.events import Reason, TransferKey
from kvpush_client.layout import Group, GroupKind
from kvpushd.core.engines import Engine
from kvpushd.core.events import Announced
from kvpushd.core.handoff import Handoff
from kvpushd.core.lane import Frontier
from kvpushd.core.layout import Blocks, Layout
from kvpushd.core.match import coverage_fault, lanes_between, pair_up
from kvpushd.core.target import Target
from kvpushd.core.words import LOCAL, SECOND, Incarnation, ReceiverView
from tests.core.pools import Model, Shape, listed, rank

KEY = TransferKey(b"k" * 16)
P, D = Incarnation(b"P" * 16), Incarnation(b"D" * 16)
END = 39


def pool(window_blocks: int) -> Layout:
    """A layer that sees all, in blocks of 4, and one with a window."""
    groups = (Group(4), Group(window_blocks, GroupKind.SLIDING_WINDOW))
    return rank(Model((0, 1), heads=1, planes=(1,)), Shape(groups, blocks=64))


def blocks(group: int, size: int, start: int, end: int) -> Blocks:
    first = 20 * group
    return Blocks(group, start, np.arange(first, first - (start - end) // size, dtype=np.int64))


def sender() -> Engine:
    engine = Engine(P, "P", {}, 1, 1)
    engine.add(0, pool(4))
    return engine


def handoff(*lists: Blocks, seal: int | None = None) -> Handoff:
    made = Handoff(P, "P", KEY, "", "", 30 * SECOND, {0: Frontier.at_start(2)}, seal=seal)
    assert made.append(lists, pool(4)) is None
    return made


def target(window_start: int, *, start: int = 0, size: int = 4) -> Target:
    """Positions from `start` on are wanted; of the window the receiver has blocks from `window_start` on."""
    said = Announced(
        LOCAL, D, KEY, "P", start, END, (blocks(0, 4, 0, END), blocks(1, size, window_start, END))
    )
    receiver = ReceiverView("D", D, {}, 1, {0: pool(size)})
    lanes = lanes_between(pair_up(sender(), receiver), start, END)
    return Target(said, receiver, P, lanes)


def fault_of(wanted: Target, offered: Handoff) -> Reason | None:
    fault = coverage_fault(wanted, offered, sender())
    return None if fault is None else fault.reason


def test_other_groups_blocks_are_known_before_a_windows_first_one_is() -> None:
    early = handoff(blocks(0, 4, 0, 12), Blocks(1, 20, np.zeros(0, np.int64)))
    assert early.named([0, 1], pool(4)) == 12
    early.append([blocks(0, 4, 0, 28)], pool(4))
    assert early.named([0, 1], pool(4)) == 20
    early.append([blocks(1, 4, 20, 28)], pool(4))
    assert early.named([0, 1], pool(4)) == 28


@pytest.mark.parametrize(("offered", "missing"), [(16, False), (20, False), (24, True), (28, True)])
def test_what_a_receiver_has_blocks_for_in_a_window_must_come(offered: int, missing: bool) -> None:
    whole = handoff(blocks(0, 4, 0, 40), blocks(1, 4, offered, 40), seal=40)
    assert fault_of(target(20), whole) == (Reason.POSITIONS_MISSING if missing else None)


def test_the_whole_of_a_receivers_larger_block_must_come() -> None:
    """It counts as computed, and other requests share it."""
    for offered, missing in ((16, False), (20, True)):
        whole = handoff(blocks(0, 4, 0, 40), blocks(1, 4, offered, 40), seal=40)
        assert fault_of(target(16, size=16), whole) == (Reason.POSITIONS_MISSING if missing else None)


def test_what_a_receiver_had_need_not_come() -> None:
    whole = handoff(blocks(0, 4, 28, 40), blocks(1, 4, 28, 40), seal=40)
    assert fault_of(target(20, start=28), whole) is None


def test_where_a_list_without_blocks_begins_is_held_to_what_is_wanted() -> None:
    late = handoff(Blocks(0, 4, np.zeros(0, np.int64)), Blocks(1, 0, np.zeros(0, np.int64)))
    assert fault_of(target(20), late) is Reason.POSITIONS_MISSING
    late = handoff(blocks(0, 4, 0, 12), Blocks(1, 24, np.zeros(0, np.int64)))
    assert fault_of(target(20), late) is Reason.POSITIONS_MISSING


def test_an_announcement_that_names_no_block_of_a_window_is_judged_by_its_start() -> None:
    bare = target(20)
    bare.said = Announced(LOCAL, D, KEY, "P", 0, END, (listed(0, *range(10)),))
    whole = handoff(blocks(0, 4, 0, 40), blocks(1, 4, 20, 40), seal=40)
    assert fault_of(bare, whole) is Reason.POSITIONS_MISSING
