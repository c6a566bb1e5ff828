# SPDX-License-Identifier: Apache-2.0
"""Spans, as an exporter gets them."""

from __future__ import annotations

import pytest

from kvpush_client.events import Fault, Reason, Side, TransferKey
from kvpushd.tracing import NoTraces, OtelTraces, open_traces

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

KEY = TransferKey(bytes(range(16)), attempt=2)


def test_a_half_is_one_span_with_its_phases_at_the_times_that_were_given() -> None:
    exporter = InMemorySpanExporter()
    traces = OtelTraces(SimpleSpanProcessor(exporter), "node-a", "1.2.3")
    span = traces.start(KEY, Side.RECEIVER, "decode-0", 1_000, label="cmpl-1")
    span.event("matched", 2_000)
    span.event("landed", 3_000, bytes=4096)
    span.end(4_000)
    (made,) = exporter.get_finished_spans()
    assert (made.name, made.start_time, made.end_time) == ("reservation", 1_000, 4_000)
    assert [(event.name, event.timestamp) for event in made.events] == [("matched", 2_000), ("landed", 3_000)]
    assert dict(made.attributes or {}) == {
        "kvpush.transfer_id": KEY.transfer_id.hex(),
        "kvpush.attempt": 2,
        "kvpush.side": "receiver",
        "kvpush.engine": "decode-0",
        "label": "cmpl-1",
    }
    assert made.status.status_code is StatusCode.OK
    assert made.resource.attributes["service.instance.id"] == "node-a"


def test_both_nodes_spans_of_a_transfer_meet_in_one_trace() -> None:
    exporter = InMemorySpanExporter()
    for node, side in (("a", Side.RECEIVER), ("b", Side.SENDER)):
        OtelTraces(SimpleSpanProcessor(exporter), node, "1").start(KEY, side, "e", 1).end(2)
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {KEY.transfer_id.hex()}
    assert len({span.context.span_id for span in spans if span.context}) == 2


def test_a_half_that_failed_carries_its_reason() -> None:
    exporter = InMemorySpanExporter()
    span = OtelTraces(SimpleSpanProcessor(exporter), "a", "1").start(KEY, Side.SENDER, "e", 1)
    span.end(2, Fault(Reason.EXPIRED, "nobody came"))
    (made,) = exporter.get_finished_spans()
    assert (made.status.status_code, made.status.description) == (StatusCode.ERROR, "expired: nobody came")
    assert (made.attributes or {})["kvpush.reason"] == "expired"


def test_without_an_endpoint_nothing_is_traced_and_nothing_fails() -> None:
    traces = open_traces("", "a", "1")
    assert isinstance(traces, NoTraces)
    span = traces.start(KEY, Side.SENDER, "e", 1)
    span.event("landed", 2)
    span.end(3)
    traces.close()
