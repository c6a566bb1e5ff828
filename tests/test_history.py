# SPDX-License-Identifier: Apache-2.0
"""What a node remembers of transfers that ended is bounded, and each engine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvpush_client.events import Counts, Fault, Reason, Side, TransferKey
from kvpushd.core.instructions import Account
from kvpushd.core.words import SECOND, Incarnation, LinkId, Times
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
def metrics() -> Metrics:
    metrics = Metrics(CollectorRegistry(), "n", "1")
    metrics.engine_registered("E")
    return metrics


@pytest.fixture
def history(ledger: Ledger, metrics: Metrics) -> History:
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
        faulted_at=0,
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


def measured(metrics: Metrics, name: str) -> tuple[float | None, float | None]:
    """How often a time was measured, and all of it in seconds."""
    value = metrics.registry.get_sample_value
    return value(f"kvpush_{name}_seconds_count"), value(f"kvpush_{name}_seconds_sum")


@pytest.mark.parametrize(("sealed", "tail"), [(5, 2.0), (7, 0.0), (9, 0.0), (0, 0.0)])
@pytest.mark.usefixtures("history")
def test_what_has_landed_before_the_last_byte_was_final_has_no_tail(
    sealed: int, tail: float, ledger: Ledger, metrics: Metrics
) -> None:
    times = Times(opened=SECOND, sealed=sealed * SECOND, landed=7 * SECOND, ended=8 * SECOND)
    ledger.end(replace(account("D", side=Side.SENDER), times=times))
    assert measured(metrics, "seal_to_landed") == (1, tail)


@pytest.mark.parametrize("side", Side)
@pytest.mark.usefixtures("history")
def test_the_fence_of_each_half_that_failed_is_measured_from_its_fault(
    side: Side, ledger: Ledger, metrics: Metrics
) -> None:
    ledger.end(account("E", side=side))
    fault = Fault(Reason.EXPIRED, "nobody came")
    times = Times(opened=SECOND, ended=8 * SECOND)
    ledger.end(replace(account("E", side=side), times=times, fault=fault, faulted_at=5 * SECOND))
    assert measured(metrics, "fence") == (1, 3.0)
