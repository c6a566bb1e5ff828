# SPDX-License-Identifier: Apache-2.0
"""What a write's end says of its link."""

from __future__ import annotations

import numpy as np
import pytest

from kvpush_client.events import TransferKey
from kvpush_client.layout import Group
from kvpushd.core.engines import Engine, Limits
from kvpushd.core.events import Announced, WriteEnded
from kvpushd.core.handoff import Handoff
from kvpushd.core.lane import Frontier
from kvpushd.core.layout import Blocks
from kvpushd.core.match import lanes_between, pair_up
from kvpushd.core.target import Target
from kvpushd.core.words import SECOND, Incarnation, LinkId, ReceiverView
from kvpushd.core.writer import Writer
from tests.core.pools import Model, Shape, rank

LINK = LinkId("B")
KEY = TransferKey(b"k" * 16)
P, D = Incarnation(b"P" * 16), Incarnation(b"D" * 16)
BLOCKS = 64


@pytest.mark.parametrize(("share", "known"), [(1.0, True), (0.9, True), (0.2, False), (0.0, False)])
def test_a_write_of_which_little_was_there_says_nothing_of_its_links_rate(share: float, known: bool) -> None:
    layout = rank(Model((0,), heads=1, planes=(1 << 16,)), Shape((Group(4),), blocks=BLOCKS))
    engine = Engine(P, "P", {}, 1, 1)
    engine.add(0, layout)
    blocks = Blocks(0, 0, np.arange(BLOCKS, dtype=np.int64))
    handoff = Handoff(P, "P", KEY, "", "", 30 * SECOND, {0: Frontier.at_start(1)})
    assert handoff.append([blocks], layout) is None
    handoff.frontiers[0].advance(BLOCKS * 4, 0, None)
    receiver = ReceiverView("D", D, {}, 1, {0: layout})
    said = Announced(LINK, D, KEY, "P", 0, BLOCKS * 4, (blocks,))
    target = Target(said, receiver, P, lanes_between(pair_up(engine, receiver), 0, BLOCKS * 4), handoff.half)
    writer, now = Writer(Limits()), 0
    for _ in range(6):
        writer.offer(target, handoff, engine)
        if writer.turn(now) is None:
            break
        post = writer.post(target, handoff, engine, now)
        assert post is not None
        now += SECOND // 50
        ended = WriteEnded(post.write, None, int(post.bytes * share), 1, now - SECOND // 50, now)
        assert writer.ended(ended) is not None
    assert (writer.rate(LINK) > 0) is known
