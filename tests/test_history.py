# SPDX-License-Identifier: Apache-2.0
"""What a node remembers of transfers that ended is bounded, and each engine's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from kvpush_client.events import Counts, Side, TransferKey
from kvpushd.core.instructions import Account
from kvpushd.core.words import Incarnation, LinkId, Times
from kvpushd.metrics import Metrics
from kvpushd.node.history import MOST_LINKS, History
from kvpushd.tracing import open_traces


class Ledger:
    """Where accounts come from."""

    def __init__(self) -> None:
        self.end: Callable[[Account], None]

    def on(self, kind: type, carry: Callable[[Account], None]) -> None:
        self.end = carry


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def history(ledger: Ledger) -> History:
    metrics = Metrics(CollectorRegistry(), "n", "1")
    metrics.engine_registered("E")
    return History(ledger, metrics, open_traces("", "n", "1"), 8)  # type: ignore[arg-type]


def account(other: str, size: int = 1, incarnation: bytes = b"i", side: Side = Side.RECEIVER) -> Account:
    key = TransferKey(b"k" * 16)
    return Account(
        side=side,
        incarnation=Incarnation(incarnation),
        engine_id="E",
        key=key,
        other=other,
        moved={LinkId(other.rpartition("@")[2]): size},
        label="",
        start=0,
        end=16,
        blocks=1,
        times=Times(opened=1, ended=2),
        sender_times=Times(),
        counts=Counts(bytes=size),
        fault=None,
    )


def test_addresses_that_moved_nothing_are_not_remembered(ledger: Ledger, history: History) -> None:
    ledger.end(account("P@nowhere:1", size=0))
    assert not history.moved


def test_of_links_that_come_under_ever_other_names_the_last_are_remembered(
    ledger: Ledger, history: History
) -> None:
    for number in range(MOST_LINKS + 10):
        ledger.end(account(f"P@node#{number}"))
    assert len(history.moved) == MOST_LINKS
    assert history.moved[f"node#{MOST_LINKS + 9}"] == 1
    assert history.moved["node#0"] == 0


def test_a_first_token_is_its_own_engines_to_tell(ledger: Ledger, history: History) -> None:
    ledger.end(account("P", incarnation=b"mine"))
    key = TransferKey(b"k" * 16)
    history.first_token(Incarnation(b"another"), key, 7)
    assert [entry.first_token_unix_ns for entry in history] == [0]
    history.first_token(Incarnation(b"mine"), key, 7)
    assert [entry.first_token_unix_ns for entry in history] == [7]
