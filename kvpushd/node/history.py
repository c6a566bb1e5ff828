# SPDX-License-Identifier: Apache-2.0
"""What became of halves that ended: remembered, counted, traced."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvpush_client.events import Side, TransferKey
from kvpushd.core.instructions import Account
from kvpushd.core.words import SECOND, Incarnation, Instant, LinkId
from kvpushd.metrics import Metrics
from kvpushd.node.hub import Hub
from kvpushd.rpc.peer_wire import unix_offset
from kvpushd.tracing import Traces

MOST_BYTES = (1 << 64) - 1
MOST_LINKS = 4096
"""Links come again under other names, and engines name addresses as they like."""


@dataclass(slots=True)
class Entry:
    """One ended half. Entries are numbered from 0, for paging."""

    number: int
    account: Account
    first_token_unix_ns: int = 0


class History:
    """The last halves that ended, newest first, and their metrics and spans."""

    def __init__(self, hub: Hub, metrics: Metrics, traces: Traces, most: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=most)
        self._metrics = metrics
        self._traces = traces
        self._count = 0
        self.landed = 0
        self.failed = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.moved: Counter[LinkId] = Counter()
        """Bytes by link: of those that moved any, the last ones."""
        hub.on(Account, self._ended)

    def __iter__(self) -> Iterator[Entry]:
        return reversed(self._entries)

    def _ended(self, account: Account) -> None:
        self._entries.append(Entry(self._count, account))
        self._count += 1
        landed = account.fault is None
        sending = account.side is Side.SENDER
        if not landed:
            self.failed += 1
        elif not sending:
            self.landed += 1
        if sending:
            self.bytes_sent += account.counts.bytes
        else:
            # Peers say how much it was: what they make up must not outgrow what can be told.
            self.bytes_received = min(self.bytes_received + account.counts.bytes, MOST_BYTES)
        for link, size in account.moved.items():
            self._note_moved(link, size)
        self._measure(account, landed, sending)
        self._trace(account)

    def _note_moved(self, link: LinkId, size: int) -> None:
        if size:
            self.moved[link] = min(self.moved[link] + size, MOST_BYTES)
        while len(self.moved) > MOST_LINKS:
            del self.moved[next(iter(self.moved))]

    def _measure(self, account: Account, landed: bool, sending: bool) -> None:
        metrics, times, engine = self._metrics, account.times, account.engine_id
        metrics.half_ended(engine, account.side, account.fault)
        if not landed:
            metrics.fenced_after(_seconds(account.faulted_at, times.ended))
        if sending:
            metrics.sent(engine, account.counts.bytes)
            if times.first_post and times.matched:
                metrics.first_posted_after(_seconds(times.matched, times.first_post))
            if landed:
                metrics.transfer_landed(account.counts)
                # What is wanted may land before all that is sealed is final; that moment then has not come.
                metrics.landed_after_seal(_seconds(times.sealed or times.landed, times.landed))
        else:
            metrics.received(engine, account.counts.bytes)
            if times.matched:
                metrics.matched_after(_seconds(times.opened, times.matched))
            if landed:
                metrics.landed_after_reserve(_seconds(times.opened, times.landed))

    def _trace(self, account: Account) -> None:
        offset = unix_offset()
        times = account.times
        span = self._traces.start(
            account.key,
            account.side,
            account.engine_id,
            times.opened + offset,
            other=account.other,
            label=account.label,
            bytes=account.counts.bytes,
        )
        for name in ("matched", "first_post", "first_landed", "sealed", "landed"):
            at = getattr(times, name)
            if at:
                span.event(name, at + offset)
        span.end(times.ended + offset, account.fault)

    def first_token(self, incarnation: Incarnation, key: TransferKey, unix_ns: int) -> None:
        """Notes when the receiver's first token came out, on its engine's last reservation of that key."""
        for entry in self:
            account = entry.account
            if (account.incarnation, account.key, account.side) == (incarnation, key, Side.RECEIVER):
                entry.first_token_unix_ns = unix_ns
                landed = account.times.landed
                if landed and account.fault is None:
                    self._metrics.first_token_after(max(0.0, (unix_ns - landed - unix_offset()) / SECOND))
                return


def _seconds(start: Instant, end: Instant) -> float:
    return max(0, end - start) / SECOND
