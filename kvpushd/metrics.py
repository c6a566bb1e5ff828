# SPDX-License-Identifier: Apache-2.0
"""What is counted and measured, and how it is exported to Prometheus.

METRICS is the one table; docs/metrics.md is made from it (`document`), which says how long a series exists.
Metrics never carry a transfer's id: traces do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpush_client.events import Counts, Fault, Reason, Side

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
RUNS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
WRITES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES = tuple(1 << power for power in range(12, 38, 2))


class Kind(Enum):
    """How a metric adds up."""

    COUNTER = Counter
    GAUGE = Gauge
    HISTOGRAM = Histogram


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `name` is as it is exported."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric("kvpush_build_info", Kind.GAUGE, "Always 1; the labels say what runs.", ("node", "version")),
    Metric("kvpush_ready", Kind.GAUGE, "1 if new work is accepted, as /readyz says."),
    Metric(
        "kvpush_sent_bytes_total",
        Kind.COUNTER,
        "Bytes of KV that landed at their receiver, counted at the sender's node; all ranks of the node "
        "add up.",
        ("engine",),
    ),
    Metric(
        "kvpush_received_bytes_total",
        Kind.COUNTER,
        "Bytes of KV that landed here, counted at the receiver's node; all ranks of the node add up.",
        ("engine",),
    ),
    Metric(
        "kvpush_transfers_total",
        Kind.COUNTER,
        "Halves that ended, each once: outcome is landed (reason none) or failed, side is sender or "
        "receiver. A half is one engine's part on one node, not one per rank.",
        ("engine", "side", "outcome", "reason"),
    ),
    Metric(
        "kvpush_transfer_bytes",
        Kind.HISTOGRAM,
        "Bytes that a transfer that landed moved, at the sender.",
        buckets=BYTES,
    ),
    Metric(
        "kvpush_transfer_runs",
        Kind.HISTOGRAM,
        "Byte runs of a transfer that landed, after merging, at the sender.",
        buckets=RUNS,
    ),
    Metric(
        "kvpush_transfer_writes",
        Kind.HISTOGRAM,
        "Writes of a transfer that landed, at the sender.",
        buckets=WRITES,
    ),
    Metric(
        "kvpush_reserve_to_matched_seconds",
        Kind.HISTOGRAM,
        "Reservation made to handoff known, at the receiver.",
        buckets=SECONDS,
    ),
    Metric(
        "kvpush_matched_to_first_post_seconds",
        Kind.HISTOGRAM,
        "Both halves known to first write posted, at the sender.",
        buckets=SECONDS,
    ),
    Metric(
        "kvpush_seal_to_landed_seconds",
        Kind.HISTOGRAM,
        "Last byte final to last byte landed, at the sender: the transfer's share of the tail. 0 where all "
        "that was wanted had landed before, e.g. without the prompt's last position.",
        buckets=SECONDS,
    ),
    Metric(
        "kvpush_reserve_to_landed_seconds",
        Kind.HISTOGRAM,
        "Reservation made to last byte landed, at the receiver; prefill is inside it.",
        buckets=SECONDS,
    ),
    Metric(
        "kvpush_landed_to_first_token_seconds",
        Kind.HISTOGRAM,
        "Last byte landed to first token out of the receiver: the engine's share of the tail.",
        buckets=SECONDS,
    ),
    Metric(
        "kvpush_fence_seconds",
        Kind.HISTOGRAM,
        "A half's bad end to the proof that none of its blocks is written or read any more: each half that "
        "failed, 0 where nothing of it was under way.",
        buckets=SECONDS,
    ),
    Metric(
        "kvpush_inlets_destroyed_total",
        Kind.COUNTER,
        "Fences that took the last rung: the receiving agent of a peer was destroyed.",
    ),
    Metric(
        "kvpush_halves_held",
        Kind.GAUGE,
        "Halves that hold blocks now, by side and phase (open, matched, moving, fencing).",
        ("side", "phase"),
    ),
    Metric(
        "kvpush_quarantined_blocks",
        Kind.GAUGE,
        "Blocks whose request has ended but whose fence has not come yet.",
        ("engine",),
    ),
    Metric("kvpush_pinned_blocks", Kind.GAUGE, "Blocks held by unmatched handoffs.", ("engine",)),
    Metric("kvpush_writes_in_flight", Kind.GAUGE, "Writes posted and not yet terminal."),
    Metric("kvpush_engines", Kind.GAUGE, "Engines with a session."),
    Metric("kvpush_pools", Kind.GAUGE, "Pools mapped."),
    Metric("kvpush_pool_bytes", Kind.GAUGE, "Bytes of the pools mapped."),
    Metric(
        "kvpush_links_up",
        Kind.GAUGE,
        "Links to peers, by what this node does on them (receiving, sending).",
        ("role",),
    ),
    Metric(
        "kvpush_links_down_total",
        Kind.COUNTER,
        "Links that ended or never came up, by the reason.",
        ("role", "reason"),
    ),
    Metric(
        "kvpush_peer_transport_info",
        Kind.GAUGE,
        "1 for each linked peer, with what UCX has said since the mover's start that it uses to any of them.",
        ("peer", "transport"),
    ),
    Metric(
        "kvpush_peer_bytes_per_second",
        Kind.GAUGE,
        "What a link to a receiving peer carries while it is busy, as its writes have shown; 0 = not known.",
        ("peer",),
    ),
    Metric("kvpush_peer_below_floor", Kind.GAUGE, "1 if that is below link_floor: an alarm.", ("peer",)),
    Metric("kvpush_mover_restarts_total", Kind.COUNTER, "Movers that died and were replaced."),
    Metric(
        "kvpush_rejected_messages_total",
        Kind.COUNTER,
        "Messages that were refused, by where they came from (engine, memory, peer, admin) and the reason.",
        ("source", "reason"),
    ),
    Metric(
        "kvpush_event_loop_lag_seconds",
        Kind.HISTOGRAM,
        "How late the daemon's event loop woke from a sleep.",
        buckets=SHORT_SECONDS,
    ),
)

PHASES = ("open", "matched", "moving", "fencing")
ROLES = ("receiving", "sending")
SOURCES = ("engine", "memory", "peer", "admin")
REASONS = tuple(reason for reason in Reason if reason is not Reason.UNSPECIFIED)


@dataclass(frozen=True, slots=True)
class Holding:
    """What is held at one moment: the gauges. Whoever scrapes gets a fresh one."""

    ready: bool = False
    engines: int = 0
    pools: int = 0
    pool_bytes: int = 0
    writes: int = 0
    halves: Mapping[tuple[Side, str], int] = field(default_factory=dict)
    quarantined_blocks: Mapping[str, int] = field(default_factory=dict)
    pinned_blocks: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[str, int] = field(default_factory=dict)
    transports: Mapping[str, str] = field(default_factory=dict)
    """Peer's node to the transport in use."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Peer's node to bytes per second; 0 = not known."""
    below_floor: Mapping[str, bool] = field(default_factory=dict)


class Metrics:
    """Counts what it is told, in a registry of its caller's. Methods are named after what happened."""

    def __init__(
        self, registry: CollectorRegistry, node: str, version: str, *, gone_engines: int = 64
    ) -> None:
        self.registry = registry
        self._gone_engines = gone_engines
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._known: set[str] = set()
        self._made: dict[str, Any] = {metric.name: _make(metric, registry) for metric in METRICS}
        self._made["kvpush_build_info"].labels(node, version).set(1)
        for role in ROLES:
            self._made["kvpush_links_up"].labels(role)
            for reason in REASONS:
                self._made["kvpush_links_down_total"].labels(role, _word(reason))
        for source in SOURCES:
            for reason in REASONS:
                self._made["kvpush_rejected_messages_total"].labels(source, _word(reason))
        for side in Side:
            for phase in PHASES:
                self._made["kvpush_halves_held"].labels(side.value, phase)

    def engine_registered(self, engine: str) -> None:
        """Makes the engine's series, at zero."""
        self._gone.pop(engine, None)
        if engine in self._known:
            return
        self._known.add(engine)
        for name in _BY_ENGINE:
            self._made[name].labels(engine)
        for labels in _outcomes(engine):
            self._made["kvpush_transfers_total"].labels(*labels)

    def engine_gone(self, engine: str) -> None:
        """Its series stay for the next scrapes; those of engines gone longest ago are dropped."""
        if engine in self._known:
            self._gone[engine] = None
            self._gone.move_to_end(engine)
        while len(self._gone) > self._gone_engines:
            self._forget(self._gone.popitem(last=False)[0])

    def sent(self, engine: str, size: int) -> None:
        """A write of the engine's landed at its receiver."""
        self._made["kvpush_sent_bytes_total"].labels(engine).inc(size)

    def received(self, engine: str, size: int) -> None:
        """Bytes landed in the engine's pools."""
        self._made["kvpush_received_bytes_total"].labels(engine).inc(size)

    def half_ended(self, engine: str, side: Side, fault: Fault | None) -> None:
        """A half ended; without a fault it landed."""
        outcome = ("landed", "none") if fault is None else ("failed", _word(fault.reason))
        self._made["kvpush_transfers_total"].labels(engine, side.value, *outcome).inc()

    def transfer_landed(self, counts: Counts) -> None:
        """What a transfer moved, at its sender."""
        self._made["kvpush_transfer_bytes"].observe(counts.bytes)
        self._made["kvpush_transfer_runs"].observe(counts.runs)
        self._made["kvpush_transfer_writes"].observe(counts.chunks)

    def matched_after(self, seconds: float) -> None:
        """A reservation's handoff became known."""
        self._made["kvpush_reserve_to_matched_seconds"].observe(seconds)

    def first_posted_after(self, seconds: float) -> None:
        """A matched transfer's first write was posted."""
        self._made["kvpush_matched_to_first_post_seconds"].observe(seconds)

    def landed_after_seal(self, seconds: float) -> None:
        """A transfer's last byte landed, so long after it was final."""
        self._made["kvpush_seal_to_landed_seconds"].observe(seconds)

    def landed_after_reserve(self, seconds: float) -> None:
        """A reservation's last byte landed."""
        self._made["kvpush_reserve_to_landed_seconds"].observe(seconds)

    def first_token_after(self, seconds: float) -> None:
        """The receiver's first token came, so long after the last byte landed."""
        self._made["kvpush_landed_to_first_token_seconds"].observe(seconds)

    def fenced_after(self, seconds: float) -> None:
        """A half that ended badly was fenced."""
        self._made["kvpush_fence_seconds"].observe(seconds)

    def inlet_destroyed(self) -> None:
        """A fence took its last rung."""
        self._made["kvpush_inlets_destroyed_total"].inc()

    def link_down(self, role: str, fault: Fault) -> None:
        """A link ended, or never came up; `role` is receiving or sending."""
        self._made["kvpush_links_down_total"].labels(role, _word(fault.reason)).inc()

    def mover_restarted(self) -> None:
        """A mover died and was replaced."""
        self._made["kvpush_mover_restarts_total"].inc()

    def rejected(self, source: str, reason: Reason) -> None:
        """A message was refused; `source` is one of SOURCES."""
        self._made["kvpush_rejected_messages_total"].labels(source, _word(reason)).inc()

    def loop_late(self, seconds: float) -> None:
        """The event loop woke so late."""
        self._made["kvpush_event_loop_lag_seconds"].observe(seconds)

    def holding(self, now: Holding) -> None:
        """Sets all gauges."""
        self._made["kvpush_ready"].set(now.ready)
        self._made["kvpush_engines"].set(now.engines)
        self._made["kvpush_pools"].set(now.pools)
        self._made["kvpush_pool_bytes"].set(now.pool_bytes)
        self._made["kvpush_writes_in_flight"].set(now.writes)
        for side in Side:
            for phase in PHASES:
                held = now.halves.get((side, phase), 0)
                self._made["kvpush_halves_held"].labels(side.value, phase).set(held)
        for engine in self._known:
            self._made["kvpush_quarantined_blocks"].labels(engine).set(now.quarantined_blocks.get(engine, 0))
            self._made["kvpush_pinned_blocks"].labels(engine).set(now.pinned_blocks.get(engine, 0))
        for role in ROLES:
            self._made["kvpush_links_up"].labels(role).set(now.links.get(role, 0))
        self._made["kvpush_peer_transport_info"].clear()
        for peer, transport in now.transports.items():
            self._made["kvpush_peer_transport_info"].labels(peer, transport).set(1)
        for name, values in (("bytes_per_second", now.rates), ("below_floor", now.below_floor)):
            self._made[f"kvpush_peer_{name}"].clear()
            for peer, value in values.items():
                self._made[f"kvpush_peer_{name}"].labels(peer).set(value)

    async def watch_loop(self, every: float = 0.5) -> None:
        """Measures the loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + every
            await asyncio.sleep(every)
            self.loop_late(max(0.0, loop.time() - due))

    def _forget(self, engine: str) -> None:
        self._known.discard(engine)
        for name in _BY_ENGINE:
            self._made[name].remove(engine)
        for labels in _outcomes(engine):
            self._made["kvpush_transfers_total"].remove(*labels)


_BY_ENGINE = tuple(metric.name for metric in METRICS if metric.labels == ("engine",))


def _outcomes(engine: str) -> list[tuple[str, str, str, str]]:
    found = [(engine, side.value, "landed", "none") for side in Side]
    return found + [(engine, side.value, "failed", _word(reason)) for side in Side for reason in REASONS]


def _word(reason: Reason) -> str:
    return reason.name.lower()


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    if metric.kind is Kind.GAUGE:
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Served at `/metrics` of the HTTP port. This page is made from the table in `kvpushd/metrics.py`",
        "by `python tools/metrics.py`.",
        "",
        "Every series exists at zero from the daemon's start, those with an `engine` label from the engine's",
        "registration; an engine's series outlive it until 64 more engines have gone. Those with a `peer`",
        "label exist while that peer is linked, its rate and the floor at the node that sends. Metrics carry",
        "no transfer ids: `kvpushctl transfers` and traces do.",
        "",
        "| name | type | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind.name.lower()} | {labels} | {metric.help} |")
    reasons = ", ".join(f"`{_word(reason)}`" for reason in REASONS)
    meant = "what each means is in `protos/kvpush/v1/types.proto`, what to do in [operating.md](operating.md)"
    return "\n".join([*lines, "", f"Reasons: {reasons}; {meant}.", ""])
