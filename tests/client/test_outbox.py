# SPDX-License-Identifier: Apache-2.0
"""What goes in one message to the daemon, and when."""

from __future__ import annotations

import threading
import time

import pytest

from kvpush_client import link
from kvpush_client.events import TransferKey
from kvpush_client.items import Advance, Item
from kvpush_client.link import Outbox

KEY = TransferKey(b"k" * 16)
LAYERS = [Advance(KEY, 7, first, first + 1) for first in range(4)]
WHOLE = Advance(KEY, 7)


def outbox(*items: Item) -> Outbox:
    made = Outbox()
    for item in items:
        made.put(item)
    return made


def test_all_that_waits_goes_in_one_message_and_in_order() -> None:
    assert outbox(*LAYERS, WHOLE).take() == [*LAYERS, WHOLE]


def test_the_first_word_of_a_forward_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SPACING", time.monotonic() / 2)
    assert outbox(LAYERS[0]).take() == LAYERS[:1]


def test_what_comes_soon_after_goes_with_what_comes_next_and_with_the_last_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "SPACING", 600.0)
    waiting = outbox(WHOLE)
    waiting.take()
    waiting.put(LAYERS[0])
    taken: list[list[Item] | None] = []
    taker = threading.Thread(target=lambda: taken.append(waiting.take()))
    taker.start()
    for item in (*LAYERS[1:], WHOLE):
        assert taker.is_alive()
        waiting.put(item)
    taker.join(30)
    assert taken == [[*LAYERS, WHOLE]]


def test_nothing_waits_for_longer_than_the_spacing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SPACING", 0.01)
    waiting = outbox(WHOLE)
    waiting.take()
    waiting.put(LAYERS[0])
    assert waiting.take() == LAYERS[:1]


def test_what_is_put_before_the_end_is_taken_before_it() -> None:
    closed = outbox(LAYERS[0])
    closed.close()
    assert [closed.take(), closed.take()] == [LAYERS[:1], []]


def test_where_nothing_comes_that_is_told() -> None:
    assert outbox().take(0.01) is None
