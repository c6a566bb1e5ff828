# SPDX-License-Identifier: Apache-2.0
"""What is exported, from the first scrape on, and that the page about it is true."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpush_client.events import Counts, Fault, Reason, Side
from kvpushd.metrics import METRICS, REASONS, Holding, Kind, Metrics, document

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), node="a", version="1.2.3", gone_engines=2)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, label values in the order of the table) to value, without creation times."""
    order = {metric.name: metric.labels for metric in METRICS}
    return {
        (sample.name, tuple(sample.labels[label] for label in order.get(sample.name, ()))): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def test_the_page_about_metrics_is_made_from_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == document(), "run `python tools/metrics.py`"


def test_names_are_of_one_family_and_say_their_unit() -> None:
    for metric in METRICS:
        assert metric.name.startswith("kvpush_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)


def test_every_metric_of_the_node_is_there_at_zero_before_anything_happened(metrics: Metrics) -> None:
    found = samples(metrics)
    for metric in METRICS:
        if "engine" not in metric.labels and "peer" not in metric.labels:
            name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
            assert any(series == name for series, _ in found), name
    assert found.pop(("kvpush_build_info", ("a", "1.2.3"))) == 1
    assert set(found.values()) == {0.0}


def test_every_series_of_an_engine_is_there_at_zero_when_it_registered(metrics: Metrics) -> None:
    metrics.engine_registered("e")
    found = samples(metrics)
    for side in ("sender", "receiver"):
        assert found["kvpush_transfers_total", ("e", side, "landed", "none")] == 0
        for reason in REASONS:
            assert found["kvpush_transfers_total", ("e", side, "failed", reason.name.lower())] == 0
    assert found["kvpush_sent_bytes_total", ("e",)] == 0
    assert found["kvpush_quarantined_blocks", ("e",)] == 0


def test_an_engine_that_registers_again_goes_on_counting(metrics: Metrics) -> None:
    metrics.engine_registered("e")
    metrics.sent("e", 10)
    metrics.engine_gone("e")
    metrics.engine_registered("e")
    metrics.sent("e", 5)
    assert samples(metrics)["kvpush_sent_bytes_total", ("e",)] == 15


def test_engines_that_come_and_go_leave_a_bounded_number_of_series(metrics: Metrics) -> None:
    for number in range(10):
        metrics.engine_registered(f"e{number}")
        metrics.received(f"e{number}", 1)
        metrics.engine_gone(f"e{number}")
    found = samples(metrics)
    left = {labels[0] for name, labels in found if name == "kvpush_received_bytes_total"}
    assert left == {"e8", "e9"}
    assert {labels[0] for name, labels in found if name == "kvpush_transfers_total"} == left


def test_ends_are_counted_by_side_outcome_and_reason(metrics: Metrics) -> None:
    metrics.engine_registered("e")
    metrics.half_ended("e", Side.SENDER, None)
    metrics.half_ended("e", Side.RECEIVER, Fault(Reason.EXPIRED, "nobody came"))
    metrics.half_ended("e", Side.RECEIVER, Fault(Reason.EXPIRED, "again"))
    found = samples(metrics)
    assert found["kvpush_transfers_total", ("e", "sender", "landed", "none")] == 1
    assert found["kvpush_transfers_total", ("e", "receiver", "failed", "expired")] == 2
    assert found["kvpush_transfers_total", ("e", "receiver", "landed", "none")] == 0


def test_each_event_reaches_its_metric(metrics: Metrics) -> None:
    metrics.transfer_landed(Counts(bytes=4096, chunks=2, chunks_before_seal=1, runs=8))
    metrics.matched_after(0.5)
    metrics.first_posted_after(0.25)
    metrics.landed_after_seal(0.125)
    metrics.landed_after_reserve(2.0)
    metrics.first_token_after(0.0625)
    metrics.fenced_after(4.0)
    metrics.loop_late(0.5)
    metrics.inlet_destroyed()
    metrics.mover_restarted()
    metrics.link_down("receiving", Fault(Reason.PEER_UNREACHABLE, "silent"))
    metrics.rejected("peer", Reason.INVALID)
    changed = {name: value for (name, labels), value in samples(metrics).items() if value and not labels}
    assert changed == {
        f"kvpush_{name}": value
        for short, total in {
            "transfer_bytes": 4096,
            "transfer_runs": 8,
            "transfer_writes": 2,
            "reserve_to_matched_seconds": 0.5,
            "matched_to_first_post_seconds": 0.25,
            "seal_to_landed_seconds": 0.125,
            "reserve_to_landed_seconds": 2.0,
            "landed_to_first_token_seconds": 0.0625,
            "fence_seconds": 4.0,
            "event_loop_lag_seconds": 0.5,
        }.items()
        for name, value in ((f"{short}_count", 1), (f"{short}_sum", total))
    } | {"kvpush_inlets_destroyed_total": 1, "kvpush_mover_restarts_total": 1}
    found = samples(metrics)
    assert found["kvpush_links_down_total", ("receiving", "peer_unreachable")] == 1
    assert found["kvpush_rejected_messages_total", ("peer", "invalid")] == 1


def test_whatever_is_measured_somebody_tells() -> None:
    told = "".join(file.read_text() for file in (ROOT / "kvpushd").rglob("*.py") if file.name != "metrics.py")
    hears = {name for name in vars(Metrics) if not name.startswith("_")}
    itself = {"loop_late"}  # told by watch_loop
    assert {name for name in hears - itself if not re.search(rf"metrics\.{name}\b", told)} == set()


def test_gauges_say_what_is_held_now_and_forget_what_was(metrics: Metrics) -> None:
    metrics.engine_registered("e")
    metrics.holding(
        Holding(
            ready=True,
            engines=1,
            writes=3,
            halves={(Side.SENDER, "moving"): 2},
            quarantined_blocks={"e": 7},
            pinned_blocks={"e": 9},
            links={"receiving": 1},
            transports={"b:1": "nixl-ucx (tcp)"},
            rates={"b:1": 2.5},
            below_floor={"b:1": True},
        )
    )
    found = samples(metrics)
    assert found["kvpush_ready", ()] == 1
    assert found["kvpush_writes_in_flight", ()] == 3
    assert found["kvpush_halves_held", ("sender", "moving")] == 2
    assert found["kvpush_quarantined_blocks", ("e",)] == 7
    assert found["kvpush_pinned_blocks", ("e",)] == 9
    assert found["kvpush_links_up", ("receiving",)] == 1
    assert found["kvpush_peer_transport_info", ("b:1", "nixl-ucx (tcp)")] == 1
    assert found["kvpush_peer_bytes_per_second", ("b:1",)] == 2.5
    assert found["kvpush_peer_below_floor", ("b:1",)] == 1
    metrics.holding(Holding())
    gauges = {m.name for m in METRICS if m.kind is Kind.GAUGE} - {"kvpush_build_info"}
    left = {key: value for key, value in samples(metrics).items() if key[0] in gauges}
    assert set(left.values()) == {0.0}
    assert ("kvpush_peer_transport_info", ("b:1", "nixl-ucx (tcp)")) not in left
    assert ("kvpush_peer_below_floor", ("b:1",)) not in left


def test_two_registries_in_one_process_do_not_meet() -> None:
    one, other = (Metrics(CollectorRegistry(), node, "1") for node in ("a", "b"))
    one.mover_restarted()
    assert samples(other)["kvpush_mover_restarts_total", ()] == 0


def test_the_event_loops_lag_is_measured() -> None:
    measured = asyncio.Event()

    class Watched(Metrics):
        def loop_late(self, seconds: float) -> None:
            super().loop_late(seconds)
            measured.set()

    async def run() -> None:
        metrics = Watched(CollectorRegistry(), "a", "1")
        watching = asyncio.ensure_future(metrics.watch_loop(every=0.001))
        async with asyncio.timeout(20):
            await measured.wait()
        watching.cancel()
        assert samples(metrics)["kvpush_event_loop_lag_seconds_count", ()] >= 1

    asyncio.run(run())
