# SPDX-License-Identifier: Apache-2.0
"""D's scheduler side: requests whose prompt is computed elsewhere.

A request is asked about once or more (`wanted`), then gets blocks (`allocated`), which are reserved at once:
from then on its KV may arrive. vLLM's request and our reservation end apart: the request when its workers
have reported it, the reservation's blocks when the daemon says that no write into them can land any more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from logging import Logger
from typing import Any, Protocol

from kvpush_client.events import Fault, Reason, ReservationEnded, ReservationReleased, Side, TransferKey
from kvpush_client.items import Sender
from kvpush_client.layout import Blocks
from kvpush_client.vllm.params import Receive
from kvpush_client.vllm.prompt import digest
from kvpush_client.vllm.references import References, longest_hold

_REMEMBERED = 8192
"""Transfer ids kept after their use, so that a second use is refused rather than waited for."""


class Desk(Protocol):
    """What is used of a session."""

    @property
    def ready(self) -> bool:
        """The daemon is there."""

    def reserve(
        self,
        key: TransferKey,
        senders: Sequence[Sender],
        start: int,
        end: int,
        blocks: Sequence[Blocks],
        *,
        lease: float | None = None,
        priority: int = 0,
        label: str = "",
        prompt: bytes = b"",
    ) -> None:
        """Promise blocks."""

    def cancel(self, key: TransferKey, side: Side, detail: str = "") -> None:
        """Take a half back."""

    def decline(self, key: TransferKey, senders: Sequence[Sender]) -> None:
        """Want nothing."""

    def first_token(self, key: TransferKey) -> None:
        """The first token is out."""


class _Stage(Enum):
    ASKED = auto()  # no blocks yet
    WAITING = auto()  # reserved
    OVER = auto()  # landed, failed, or computed locally


@dataclass(slots=True)
class _Wanted:
    request: Any
    receive: Receive
    stage: _Stage = _Stage.ASKED
    start: int = 0
    duplicate: bool = False

    @property
    def key(self) -> TransferKey:
        return TransferKey(self.receive.transfer_id)


@dataclass(slots=True)
class _Reservation:
    request_id: str
    ended: bool = False
    left_at: float | None = None
    """When its request ended, if it has: since then only we hold its blocks."""


class Receiver:
    """All requests of D that wait for KV. Scheduler's thread only.

    `group_sizes` are the block sizes of the transferable groups, `group_ids` their places among vLLM's.
    """

    def __init__(
        self,
        desk: Desk,
        references: References,
        *,
        group_ids: Sequence[int],
        group_sizes: Sequence[int],
        lease: float | None,
        recompute: bool,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._desk = desk
        self._references = references
        self._group_ids = tuple(group_ids)
        self._group_sizes = tuple(group_sizes)
        self._lease = lease
        self._recompute = recompute
        self._log = log
        self._requests: dict[str, _Wanted] = {}
        self._reservations: dict[TransferKey, _Reservation] = {}
        self._spent: OrderedDict[bytes, None] = OrderedDict()
        self._tokenless: dict[str, _Wanted] = {}
        self._waits: list[tuple[TransferKey, str]] = []
        self._ends: list[tuple[TransferKey, Fault | None]] = []
        self.draining = False

    def __len__(self) -> int:
        return len(self._requests) + len(self._reservations)

    def add(self, request: Any, receive: Receive) -> None:
        """A request of D's leg is new."""
        self._requests[request.request_id] = _Wanted(request, receive)

    def wanted(self, request_id: str, computed: int) -> int:
        """How many positions beyond `computed` are to come from P; 0 = all are computed here.

        Never the last position of the prompt: a forward over it gives the first token. May be asked again
        until blocks are allocated; afterwards, that is after a failure or a preemption, the answer is 0.
        """
        wanted = self._requests.get(request_id)
        if wanted is None or wanted.stage is not _Stage.ASKED:
            return 0
        prompt = wanted.request.num_prompt_tokens
        wanted.start = computed
        wanted.duplicate = wanted.receive.transfer_id in self._spent
        # A prefix hit always leaves 1 to block_size tokens, so a full hit waits for nobody. (And one block is
        # computed sooner than it arrives.)
        if prompt - computed <= min(self._group_sizes) or wanted.duplicate:
            return 0
        if self._recompute and (self.draining or not self._desk.ready):
            return 0
        return int(prompt) - 1 - computed

    def allocated(self, request_id: str, blocks: Sequence[Sequence[Any]], external: int) -> None:
        """vLLM allocated `blocks`, per group of its own, of which `external` positions wait for KV."""
        wanted = self._requests.get(request_id)
        if wanted is None or wanted.stage is not _Stage.ASKED:
            return
        if external <= 0:
            self._compute_locally(wanted)
            return
        key, start, end = wanted.key, wanted.start, wanted.start + external
        named = [self._blocks(group, blocks, start, end) for group in range(len(self._group_ids))]
        wanted.stage = _Stage.WAITING
        self._spend(key.transfer_id)
        self._reservations[key] = _Reservation(request_id)
        self._waits.append((key, request_id))
        for listed in named:
            self._references.take((Side.RECEIVER, key), listed.ids)
        self._desk.reserve(
            key,
            [wanted.receive.sender],
            start,
            end,
            [listed for listed in named if listed.ids],
            lease=self._lease,
            priority=-int(wanted.request.priority),  # vLLM's smaller number goes first
            label=request_id,
            prompt=digest(wanted.request.prompt_token_ids, end),
        )

    def _compute_locally(self, wanted: _Wanted) -> None:
        wanted.stage = _Stage.OVER
        request_id = wanted.request.request_id
        if wanted.duplicate:
            self._log.warning(
                "request %s: transfer %s is or was another request's; computed here",
                request_id,
                wanted.receive.transfer_id.hex(),
            )
        self._let_go(wanted)

    def _let_go(self, wanted: _Wanted) -> None:
        """Its sender need not send it. Where the transfer is, was or may yet be another request's nothing is
        said: the word would end that one."""
        transfer = wanted.receive.transfer_id
        others = any(
            other is not wanted and other.stage is _Stage.ASKED and other.receive.transfer_id == transfer
            for other in self._requests.values()
        )
        if transfer not in self._spent and not others:
            self._spend(transfer)
            self._desk.decline(wanted.key, [wanted.receive.sender])

    def _blocks(self, group: int, blocks: Sequence[Sequence[Any]], start: int, end: int) -> Blocks:
        size = self._group_sizes[group]
        first, ids = start // size, list[int]()
        for block in blocks[self._group_ids[group]][first : -(-end // size)]:
            if block.is_null:
                # What a window has passed. Blocks in front of it are as useless, so the list begins after it.
                first, ids = first + len(ids) + 1, []
            else:
                ids.append(block.block_id)
        return Blocks(group, first * size, ids)

    def finished(self, request_id: str) -> None:
        """vLLM is done with the request, or its client is."""
        wanted = self._requests.pop(request_id, None)
        if wanted is None:
            return
        for held in self._reservations.values():
            if held.request_id == request_id:
                held.left_at = self._clock()
        if wanted.stage is _Stage.ASKED:
            self._let_go(wanted)
        elif wanted.stage is _Stage.WAITING:
            # The workers must report it, once, or vLLM keeps it for ever. Its blocks have our reference too.
            self._desk.cancel(wanted.key, Side.RECEIVER, "the request was aborted")
            self._ends.append((wanted.key, Fault(Reason.CANCELLED, "the request was aborted")))
        tokenless = self._tokenless.pop(request_id, None)
        if tokenless is not None and wanted.request.num_output_tokens > 0:
            self._desk.first_token(wanted.key)

    def on_ended(self, event: ReservationEnded) -> None:
        """The wait for a reservation is over."""
        reservation = self._reservations.get(event.key)
        if reservation is None or reservation.ended:
            return
        reservation.ended = True
        self._ends.append((event.key, event.fault))
        wanted = self._requests.get(reservation.request_id)
        if wanted is not None and wanted.key == event.key:
            wanted.stage = _Stage.OVER
            if event.fault is None:
                self._tokenless[reservation.request_id] = wanted
            else:
                self._log.warning("request %s: no KV came: %s", reservation.request_id, event.fault)
        if event.released:
            self._release(event.key)

    def on_released(self, event: ReservationReleased) -> None:
        """No write into the reservation's blocks can land any more."""
        if event.key in self._reservations:
            self._release(event.key)

    def _release(self, key: TransferKey) -> None:
        del self._reservations[key]
        self._references.drop((Side.RECEIVER, key))

    @property
    def fencing(self) -> bool:
        """Blocks of a request that has ended may still be written: the engine's cache can't be reset yet.
        False where that takes longer than a daemon that lives lets it."""
        since = self._clock() - longest_hold(self._lease)
        left = (held.left_at for held in self._reservations.values())
        return any(at is not None and at > since for at in left)

    def take_step(self) -> tuple[list[tuple[TransferKey, str]], list[tuple[TransferKey, Fault | None]]]:
        """What the workers must hear with the next step: new waits, and ends."""
        if self._tokenless:
            for request_id, wanted in list(self._tokenless.items()):
                if wanted.request.num_output_tokens > 0:
                    del self._tokenless[request_id]
                    self._desk.first_token(wanted.key)
        waits, self._waits = self._waits, []
        ends, self._ends = self._ends, []
        return waits, ends

    def _spend(self, transfer_id: bytes) -> None:
        self._spent[transfer_id] = None
        if len(self._spent) > _REMEMBERED:
            self._spent.popitem(last=False)
