# SPDX-License-Identifier: Apache-2.0
"""P's scheduler side: requests whose KV is handed off while it is computed.

A handoff is opened when the request arrives, so that D's half is matched, and waits under no lease, while the
request still queues here. Each step appends the blocks that it computes in, and the step that reaches the
prompt's end seals. The seal is the whole prompt. D reserves only up to its own prompt's last position, which
it computes itself to get the first token: one less than the seal, or as much, where a router has added P's
first token to D's prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import Logger
from typing import Any, Protocol

from kvpush_client.events import Fault, HandoffEnded, Matched, Side, TransferKey
from kvpush_client.items import Prompt
from kvpush_client.layout import Blocks
from kvpush_client.vllm.metadata import Progress
from kvpush_client.vllm.params import Send
from kvpush_client.vllm.prompt import digests
from kvpush_client.vllm.references import References, longest_hold
from kvpush_client.vllm.writers import Writers

_PATIENCE_S = 1.0
"""How long vLLM may wait for our references rather than preempt: about what a preemption costs."""
_LULL_S = 0.1
"""Requests that lacked blocks have some where nobody has asked for so long."""
_LARGEST_BLOCK = 128
"""Positions of a receiver's blocks at most that gets all of its window from us: see `_first_wanted`."""


class Desk(Protocol):
    """What is used of a session."""

    @property
    def ready(self) -> bool:
        """The daemon is there."""

    def handoff(
        self,
        key: TransferKey,
        blocks: Sequence[Blocks],
        *,
        seal: int | None = None,
        lease: float | None = None,
        receiver_engine_id: str = "",
        label: str = "",
        prompts: Sequence[Prompt] = (),
    ) -> None:
        """Open, append, seal."""

    def cancel(self, key: TransferKey, side: Side, detail: str = "") -> None:
        """Take a half back."""


@dataclass(slots=True)
class _Outgoing:
    """A request's handoff: its latest attempt."""

    request: Any
    send: Send
    seal: int
    named: list[int]
    """Per group: how many of the request's blocks were looked at, null ones included."""
    attempt: int = 0
    begun: bool = False
    sealed: bool = False
    fault: Fault | None = None

    @property
    def key(self) -> TransferKey:
        return TransferKey(self.send.transfer_id, self.attempt)


@dataclass(slots=True)
class _Handoff:
    """An attempt that the daemon has not ended."""

    transfer_id: bytes
    matched: bool = False
    left_at: float = 0.0
    """When its request ended: since then only we hold its blocks."""


@dataclass(slots=True)
class Scheduled:
    """A step as far as the sender needs it: tokens per scheduled request, block ids per request and group."""

    tokens: Mapping[str, int]
    preempted: frozenset[str] | set[str]
    block_ids: Callable[[str], Sequence[Sequence[int]]]
    writers: Writers = field(default_factory=Writers)


class Sender:
    """All handoffs of P. Scheduler's thread only; see Receiver for `group_ids` and `group_sizes`."""

    def __init__(
        self,
        desk: Desk,
        references: References,
        *,
        group_ids: Sequence[int],
        group_sizes: Sequence[int],
        group_windows: Sequence[int | None],
        lease: float | None,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`group_windows`: positions that attention looks back in each group; None = all of them."""
        self._desk = desk
        self._references = references
        self._group_ids = tuple(group_ids)
        self._group_sizes = tuple(group_sizes)
        self._group_windows = tuple(group_windows)
        self._lease = lease
        self._log = log
        self._clock = clock
        self._requests: dict[str, _Outgoing] = {}
        self._open: dict[str, _Outgoing] = {}
        """Those that are neither sealed nor failed: what a step may move."""
        self._handoffs: dict[TransferKey, _Handoff] = {}
        self._transfers: dict[bytes, int] = {}
        """Live handoffs per transfer: several while attempts overlap."""
        self._left: dict[TransferKey, _Handoff] = {}
        self._stalled_since = self._asked_at = -_PATIENCE_S
        """Since when schedules have asked whether blocks will be free, and when one last did."""
        self.draining = False

    def __len__(self) -> int:
        return len(self._requests) + len(self._handoffs)

    def add(self, request: Any, send: Send) -> None:
        """A request of P's leg is new: its handoff is opened, with no blocks yet."""
        request_id, seal = request.request_id, int(request.num_prompt_tokens)
        if seal < 2:
            return  # the only position is the one that D computes itself
        if send.transfer_id in self._transfers:
            self._log.warning(
                "request %s: transfer %s is another request's; nothing is handed off",
                request_id,
                send.transfer_id.hex(),
            )
            return
        if self.draining or not self._desk.ready:
            self._log.warning("request %s: the daemon is away or drains; nothing is handed off", request_id)
            return
        outgoing = _Outgoing(request, send, seal, [0] * len(self._group_ids))
        self._requests[request_id] = outgoing
        self._begin(outgoing)

    def _begin(self, outgoing: _Outgoing) -> None:
        self._open[outgoing.request.request_id] = outgoing
        self._handoffs[outgoing.key] = _Handoff(outgoing.send.transfer_id)
        self._transfers[outgoing.send.transfer_id] = self._transfers.get(outgoing.send.transfer_id, 0) + 1
        self._say(outgoing, [], digests(outgoing.request.prompt_token_ids))

    def _say(self, outgoing: _Outgoing, blocks: Sequence[Blocks], prompts: Sequence[Prompt] = ()) -> None:
        self._desk.handoff(
            outgoing.key,
            blocks,
            seal=outgoing.seal if outgoing.sealed else None,
            lease=self._lease,
            receiver_engine_id=outgoing.send.receiver_engine_id,
            label=outgoing.request.request_id,
            prompts=prompts,
        )

    def step(self, scheduled: Scheduled) -> list[Progress]:
        """Names the blocks of a step that was just scheduled, before it runs; returns what it makes final."""
        if not self._open:
            return []
        for request_id in scheduled.preempted:
            outgoing = self._open.get(request_id)
            if outgoing is not None and outgoing.begun:
                # The new attempt takes over what the old one was matched with, so the old is not cancelled.
                outgoing.attempt += 1
                outgoing.begun = False
                outgoing.named = [0] * len(self._group_ids)
                self._begin(outgoing)
        progress = []
        for request_id, outgoing in list(self._open.items()):
            tokens = scheduled.tokens.get(request_id)
            if tokens is not None:
                progress.append(self._move(outgoing, tokens, scheduled))
        return progress

    def _move(self, outgoing: _Outgoing, tokens: int, scheduled: Scheduled) -> Progress:
        request_id = outgoing.request.request_id
        computed = outgoing.request.num_computed_tokens
        after = min(computed + tokens, outgoing.seal)
        tables = scheduled.block_ids(request_id)
        before = 0
        begins = not outgoing.begun
        if begins:
            # A prefix hit. (Later steps' beginnings are former steps' ends, which were said then.)
            before = min(scheduled.writers.final_below(tables, computed), outgoing.seal)
            outgoing.begun = True
        named = []
        for group, size in enumerate(self._group_sizes):
            blocks = self._append(outgoing, group, size, tables[self._group_ids[group]], after)
            if blocks.ids:
                self._references.take((Side.SENDER, outgoing.key), blocks.ids)
            # At first without any, too: that says from where on there will be some, and other groups' go.
            if blocks.ids or begins:
                named.append(blocks)
        if after == outgoing.seal:
            outgoing.sealed = True
            del self._open[request_id]
        if named or outgoing.sealed:
            self._say(outgoing, named)
        return Progress(outgoing.key, before, after)

    def _append(self, outgoing: _Outgoing, group: int, size: int, table: Sequence[int], after: int) -> Blocks:
        first = max(outgoing.named[group], self._first_wanted(group, size, outgoing.seal))
        ids = list(table[first : -(-after // size)])
        outgoing.named[group] = first + len(ids)
        # What a window had passed before we saw it (a prefix hit) is at the front.
        while ids and self._references.is_null(ids[0]):
            del ids[0]
            first += 1
        return Blocks(group, first * size, ids)

    def _first_wanted(self, group: int, size: int, seal: int) -> int:
        """The first of a request's blocks that a receiver wants. What no window at the prompt's end reaches
        is not named: our reference would hold it while the prompt takes, though vLLM frees it."""
        window = self._group_windows[group]
        if window is None:
            return 0
        # A receiver's own end is one less than the seal, or where vLLM cuts that to whole blocks; and what it
        # wants begins with a block of its.
        return max(0, seal - window - max(*self._group_sizes, _LARGEST_BLOCK)) // size

    def finished(self, request_id: str) -> Send | None:
        """vLLM is done with the request. Returns what D must know to receive it; None if it can't."""
        outgoing = self._requests.pop(request_id, None)
        if outgoing is None:
            return None
        if self._open.pop(request_id, None) is not None:
            self._desk.cancel(outgoing.key, Side.SENDER, "the request ended before its prompt was computed")
            self._leave(outgoing)
            return None
        self._leave(outgoing)
        if outgoing.fault is not None or not outgoing.sealed:
            return None
        return outgoing.send

    def _leave(self, outgoing: _Outgoing) -> None:
        """Notes that only we hold the blocks of what its attempts have under way."""
        for attempt in range(outgoing.attempt + 1):
            key = TransferKey(outgoing.send.transfer_id, attempt)
            handoff = self._handoffs.get(key)
            if handoff is not None:
                handoff.left_at = self._clock()
                self._left[key] = handoff

    def on_matched(self, event: Matched) -> None:
        """D's half exists."""
        handoff = self._handoffs.get(event.key)
        if handoff is not None:
            handoff.matched = True

    def on_ended(self, event: HandoffEnded) -> None:
        """Nothing reads the handoff's blocks any more."""
        handoff = self._handoffs.pop(event.key, None)
        if handoff is None:
            return
        self._references.drop((Side.SENDER, event.key))
        self._left.pop(event.key, None)
        live = self._transfers[handoff.transfer_id] - 1
        if live:
            self._transfers[handoff.transfer_id] = live
        else:
            del self._transfers[handoff.transfer_id]
        if event.fault is None:
            return
        for request_id, outgoing in self._requests.items():
            if outgoing.key == event.key:
                outgoing.fault = event.fault
                self._open.pop(request_id, None)
                self._log.warning("request %s: not handed off: %s", request_id, event.fault)
                return

    @property
    def moving(self) -> bool:
        """A handoff holds blocks of a request that has ended: the engine shall not stop yet, and its cache
        can't be reset. False where that takes longer than a daemon that lives lets it."""
        since = self._clock() - longest_hold(self._lease)
        return any(handoff.left_at > since for handoff in self._left.values())

    @property
    def freeing(self) -> bool:
        """Asked where a request lacks blocks: one that left a moment ago will soon free some that nobody else
        holds. False once schedules have asked for a while, though others leave: what lacks blocks would wait
        for as long as they do."""
        now = self._clock()
        # Not each schedule asks of one that waits, where others are served between.
        if now - self._asked_at > _LULL_S:
            self._stalled_since = now
        self._asked_at = now
        if not any(h.matched and h.left_at > now - _PATIENCE_S for h in self._left.values()):
            return False
        return now - self._stalled_since < _PATIENCE_S
