# SPDX-License-Identifier: Apache-2.0
"""A thousand requests that are given up at once, most of them with bytes under way."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpush_client.events import (
    HandoffEnded,
    Matched,
    Reason,
    ReservationEnded,
    ReservationReleased,
    Side,
    TransferKey,
)
from testing.node import Node
from testing.rank import BLOCK, Engine, new_key
from tests.daemon.daemon_kit import Nodes, eventually, stopped, transfer

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

REQUESTS = 1000
SENDING = 700
"""Of these all bytes were posted; the others wait for their sender."""
AGAIN = 0xEE
"""What the receiver's next requests write into blocks as soon as they have them back."""


class Receiver:
    """Hears of its reservations, and uses their blocks again as soon as they are its own."""

    def __init__(self, engine: Engine, keys: list[TransferKey]) -> None:
        self._engine = engine
        self._blocks = {key: n for n, key in enumerate(keys)}
        self.ends = Counter[TransferKey]()
        self.returned = Counter[TransferKey]()
        self.reasons = Counter[Reason]()

    def hear(self) -> None:
        """Takes what has come."""
        for event in self._engine.scheduler.poll():
            if isinstance(event, ReservationEnded):
                assert event.fault is not None, "nothing was sealed"
                self.reasons[event.fault.reason] += 1
                self.ends[event.key] += 1
                if event.released:
                    self._back(event.key)
            elif isinstance(event, ReservationReleased):
                assert event.key in self.ends, "its blocks before its end"
                self._back(event.key)

    def _back(self, key: TransferKey) -> None:
        self.returned[key] += 1
        self._engine.ranks[0].bytes[:, self._blocks[key]] = AGAIN


def ended(node: Node, side: str) -> float:
    """Halves that a node has counted."""
    return node.metric("kvpush_transfers_total", side=side)


def test_a_thousand_aborts_with_bytes_under_way_return_each_block_once_and_after_the_fence(
    nodes: Nodes,
) -> None:
    p, d = nodes.pair(blocks=1024, cell=16)  # small: whatever a link's rate, all may be in flight
    p.fill(range(REQUESTS), 31)
    counted = ended(nodes.d, "receiver"), ended(nodes.p, "sender")
    keys = [new_key() for _ in range(REQUESTS)]
    for n, key in enumerate(keys):
        d.reserve(key, p, [n], BLOCK, lease=300)
        p.hand_off(key, [n], lease=300)
    matched = Counter[TransferKey]()

    def hear_matched() -> int:
        matched.update(event.key for event in d.scheduler.poll() if isinstance(event, Matched))
        return len(matched)

    eventually(hear_matched, lambda heard: heard == REQUESTS)
    receiver = Receiver(d, keys)
    with stopped(nodes.d.mover_pid):
        for key in keys[:SENDING]:
            p.advance(key, BLOCK)
        eventually(lambda: nodes.p.status().held.writes, lambda writes: writes == SENDING)
        for key in keys:
            d.scheduler.cancel(key, Side.RECEIVER)
        eventually(lambda: (receiver.hear(), receiver.ends.total())[1], lambda heard: heard == REQUESTS)
        under_way = nodes.p.status().held.writes
        assert under_way > SENDING // 2
        receiver.hear()
        assert REQUESTS - receiver.returned.total() >= under_way
        assert nodes.d.status().held.quarantined_blocks >= under_way
        assert REQUESTS - sum(isinstance(event, HandoffEnded) for event in p.heard) >= under_way
    eventually(lambda: (receiver.hear(), receiver.returned.total())[1], lambda back: back >= REQUESTS)
    for key in keys:
        end = p.wait_for(HandoffEnded, key)
        assert end.fault is not None
    assert set(receiver.reasons) <= {Reason.CANCELLED}, receiver.reasons
    # Whatever was under way has come, or never will: the link carries others' bytes behind it.
    transfer(*nodes.pair())
    eventually(lambda: nodes.p.status().held.writes == 0)
    receiver.hear()
    for counts in (receiver.ends, receiver.returned):
        assert counts == Counter(dict.fromkeys(keys, 1))
    assert (d.ranks[0].bytes[:, :REQUESTS] == AGAIN).all(), "a write landed after its fence"
    assert ended(nodes.d, "receiver") - counted[0] == REQUESTS + 1
    assert ended(nodes.p, "sender") - counted[1] == REQUESTS + 1
