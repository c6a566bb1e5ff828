# SPDX-License-Identifier: Apache-2.0
"""What a request brings along is no reason to refuse its transfer."""

from __future__ import annotations

import pytest

from kvpush_client import item_wire
from kvpush_client.events import TransferKey
from kvpush_client.items import Handoff, Prompt, Reserve, Sender
from kvpush_client.layout import Blocks
from kvpush_client.wire import Malformed

KEY = TransferKey(b"k" * 16)
SENDERS = (Sender("P", "127.0.0.1", 7766),)
BLOCKS = (Blocks(0, 0, (1,)),)


@pytest.mark.parametrize(("asked", "said"), [(1 << 40, (1 << 31) - 1), (-(1 << 40), 1 - (1 << 31)), (-7, -7)])
def test_any_priority_keeps_its_place_as_far_as_the_message_goes(asked: int, said: int) -> None:
    message = item_wire.item_to_wire(Reserve(KEY, SENDERS, 0, 16, BLOCKS, priority=asked))
    assert message.reserve.priority == said


def test_digests_of_prompts_come_through_and_what_is_none_is_refused() -> None:
    prompts = (Prompt(7, b"x" * 32), Prompt(8, b""))
    for item in (Reserve(KEY, SENDERS, 0, 16, (), prompt=b"x" * 16), Handoff(KEY, (), prompts=prompts)):
        assert item_wire.item_from_wire(item_wire.item_to_wire(item)) == item
    long, many = Prompt(7, b"x" * 33), (Prompt(7, b""),) * 9
    for wrong in (
        Reserve(KEY, SENDERS, 0, 16, (), prompt=b"x" * 33),
        Handoff(KEY, (), prompts=(long,)),
        Handoff(KEY, (), prompts=many),
        Handoff(KEY, (), prompts=(Prompt(1 << 31, b""),)),
    ):
        with pytest.raises(Malformed, match=r"digest|prompt|end"):
            item_wire.item_from_wire(item_wire.item_to_wire(wrong))


def test_the_longest_request_id_is_cut_and_the_item_is_taken() -> None:
    for item in (Reserve(KEY, SENDERS, 0, 16, BLOCKS, label="x" * 9000), Handoff(KEY, (), label="x" * 9000)):
        taken = item_wire.item_from_wire(item_wire.item_to_wire(item))
        assert isinstance(taken, Reserve | Handoff)
        assert taken.label == "x" * 512
