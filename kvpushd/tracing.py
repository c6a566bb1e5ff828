# SPDX-License-Identifier: Apache-2.0
"""One span per half, exported by OTLP where an endpoint is configured, else nothing.

A transfer's id is its trace's id, so the spans of both nodes meet in one trace without being passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpush_client.events import Fault, Side, TransferKey
from kvpushd.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span


class HalfSpan(Protocol):
    """The account of one half. Times are Unix nanoseconds, given by the caller."""

    def event(self, name: str, at_ns: int, **attributes: str | int) -> None:
        """A phase was reached, e.g. "matched", "first_post", "sealed", "landed"."""

    def end(self, at_ns: int, fault: Fault | None = None) -> None:
        """The half ended; nothing is said of it after that."""


class Traces(Protocol):
    """Where spans are begun."""

    def start(
        self, key: TransferKey, side: Side, engine: str, at_ns: int, **attributes: str | int
    ) -> HalfSpan:
        """A half was made."""

    def close(self) -> None:
        """Sends what was not sent yet; blocks for as long as the exporter takes, some seconds at most."""


class NoSpan:
    """Nobody listens."""

    def event(self, name: str, at_ns: int, **attributes: str | int) -> None:
        """Nothing."""

    def end(self, at_ns: int, fault: Fault | None = None) -> None:
        """Nothing."""


class NoTraces:
    """Nobody listens."""

    def __init__(self) -> None:
        self._span = NoSpan()

    def start(
        self, key: TransferKey, side: Side, engine: str, at_ns: int, **attributes: str | int
    ) -> HalfSpan:
        """Nothing."""
        return self._span

    def close(self) -> None:
        """Nothing."""


class OtelSpan:
    """A span of OpenTelemetry."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def event(self, name: str, at_ns: int, **attributes: str | int) -> None:
        """As the contract says."""
        self._span.add_event(name, attributes, timestamp=at_ns)

    def end(self, at_ns: int, fault: Fault | None = None) -> None:
        """As the contract says; a fault becomes the span's error status."""
        from opentelemetry.trace import Status, StatusCode

        if fault is None:
            self._span.set_status(Status(StatusCode.OK))
        else:
            self._span.set_attribute("kvpush.reason", fault.reason.name.lower())
            self._span.set_status(Status(StatusCode.ERROR, str(fault)))
        self._span.end(end_time=at_ns)


class OtelTraces:
    """Spans of OpenTelemetry's SDK; its provider is this object's own, not the process's."""

    def __init__(self, processor: SpanProcessor, node: str, version: str) -> None:
        """Spans that ended go to `processor`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(
            {"service.name": "kvpushd", "service.version": version, "service.instance.id": node}
        )
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvpushd", version)

    def start(
        self, key: TransferKey, side: Side, engine: str, at_ns: int, **attributes: str | int
    ) -> HalfSpan:
        """As the contract says."""
        from opentelemetry import trace

        parent = trace.SpanContext(
            trace_id=int.from_bytes(key.transfer_id, "big") or 1,
            # The transfer itself, which no process has a span of.
            span_id=int.from_bytes(key.transfer_id[:8], "big") or 1,
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        span = self._tracer.start_span(
            "reservation" if side is Side.RECEIVER else "handoff",
            context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind.CONSUMER if side is Side.RECEIVER else trace.SpanKind.PRODUCER,
            start_time=at_ns,
            attributes={
                "kvpush.transfer_id": key.transfer_id.hex(),
                "kvpush.attempt": key.attempt,
                "kvpush.side": side.value,
                "kvpush.engine": engine,
                **attributes,
            },
        )
        return OtelSpan(span)

    def close(self) -> None:
        """As the contract says."""
        self._provider.shutdown()


def open_traces(endpoint: str, node: str, version: str) -> Traces:
    """Traces to an OTLP endpoint ("http://host:4317"), or none if it is empty.

    Raises ConfigError if there is an endpoint, but OpenTelemetry is not installed.
    """
    if not endpoint:
        return NoTraces()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint is set, but OpenTelemetry is missing ({error}): pip install 'kvpushd[tracing]'"
        ) from error

    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
    return OtelTraces(BatchSpanProcessor(exporter), node, version)
