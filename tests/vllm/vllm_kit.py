# SPDX-License-Identifier: Apache-2.0
"""Requests, and a desk that records what it is told, for the scheduler side's tests."""

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvpush_client.events import (
    Connected,
    Fault,
    HandoffEnded,
    Matched,
    Reason,
    ReservationEnded,
    ReservationReleased,
    Side,
)
from kvpush_client.items import Sender as SenderAddress
from kvpush_client.vllm.params import Receive, Send
from kvpush_client.vllm.references import References

LOG = logging.getLogger("kvpush")
SIZE = 16
BLOCKS = 64


@dataclass
class Request:
    """What the sides read of vLLM's request."""

    request_id: str = "r"
    num_prompt_tokens: int = 100
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    priority: int = 0
    kv_transfer_params: Any = None
    lora_request: Any = None
    resumable: bool = False
    prompt_token_ids: Any = None


@dataclass
class Desk:
    """A session that does nothing but remember."""

    ready: bool = True
    said: list[tuple[Any, ...]] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    """What was said of prompts with each of these."""
    events: list[Any] = field(default_factory=list)
    comes: list[Any] = field(default_factory=list)
    """What the daemon says during the next wait."""
    waits: int = 0

    def wait(self, timeout):
        self.waits += 1
        self.events, self.comes = self.events + self.comes, []

    def poll(self):
        events, self.events = self.events, []
        return events

    def reserve(self, key, senders, start, end, blocks, *, lease=None, priority=0, label="", prompt=b""):
        self.prompts.append(prompt)
        self.said.append(
            ("reserve", key, start, end, [(b.group, b.start, list(b.ids)) for b in blocks], priority)
        )

    def handoff(self, key, blocks, *, seal=None, lease=None, receiver_engine_id="", label="", prompts=()):
        self.prompts.append(prompts)
        self.said.append(("handoff", key, [(b.group, b.start, list(b.ids)) for b in blocks], seal))

    def advance(self, key, positions, *, first_layer=0, end_layer=None):
        self.said.append(("advance", key, positions, first_layer, end_layer))

    def cancel(self, key, side, detail=""):
        self.said.append(("cancel", key, side))

    def decline(self, key, senders):
        self.said.append(("decline", key, [sender.engine_id for sender in senders]))

    def first_token(self, key):
        self.said.append(("first_token", key))

    def close(self):
        self.said.append(("close",))

    def take(self):
        """What was said since the last call."""
        said, self.said = self.said, []
        return said

    def words(self):
        """As `take`, only the verbs."""
        return [said[0] for said in self.take()]


class Blocks:
    """vLLM's own block pool, its requests' tables, and our references."""

    def __init__(self, blocks=BLOCKS):
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=SIZE)
        self.references = References(self.pool)
        self.tables: dict[str, list[Any]] = {}

    def grow(self, request_id, tokens):
        """Allocate until the request's table holds so many tokens; returns its blocks."""
        table = self.tables.setdefault(request_id, [])
        table.extend(self.pool.get_new_blocks(-(-tokens // SIZE) - len(table)))
        return table

    def free(self, request_id):
        """As vLLM does, without asking anybody."""
        self.pool.free_blocks(reversed(self.tables.pop(request_id)))

    def ids(self, request_id):
        return ([block.block_id for block in self.tables[request_id]],)

    @property
    def all_free(self):
        return self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1 and len(self.references) == 0


def transfer(number=1):
    return number.to_bytes(16, "big")


def receive(number=1):
    return Receive(transfer(number), SenderAddress("P", "node-p", 4711))


def send(number=1):
    return Send(transfer(number), "")


def landed(key):
    return ReservationEnded(key, None, released=True)


def failed(key, *, released, reason=Reason.EXPIRED):
    return ReservationEnded(key, Fault(reason, "for a test"), released=released)


def released(key):
    return ReservationReleased(key)


def delivered(key):
    return HandoffEnded(key, None)


def not_delivered(key, reason=Reason.EXPIRED):
    return HandoffEnded(key, Fault(reason, "for a test"))


def back():
    return Connected(b"k" * 16, "node-d", 4712)


def came(key):
    return Matched(key, Side.SENDER)
