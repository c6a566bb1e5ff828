# SPDX-License-Identifier: Apache-2.0
"""A pair: an engine that prefills, one that decodes, and the daemons of their nodes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpush_client._proto import admin_pb2
from testing.clockwork.harness import Engine, Output, Request
from testing.engines import DECODE, PREFILL, answer, coordinates
from testing.node import Node

WAIT = 120.0
"""Seconds within which anything that is waited for must happen, on a machine with much else to do."""


def eventually(what: str, holds: Callable[[], object], wait: float = WAIT) -> Any:
    """Asks until the answer is true, and returns it. Raises AssertionError with the last one."""
    deadline = time.monotonic() + wait
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {wait:g} s"
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Side:
    """An engine and its node."""

    engine: Engine
    node: Node


@dataclass(slots=True)
class Legs:
    """One prompt, dispatched to both engines."""

    tokens: list[int]
    count: int
    transfer_id: bytes
    p: Request
    d: Request

    def right(self) -> Output:
        """D's output, which must be what a correct engine says."""
        output = self.d.result(WAIT)
        assert output.token_ids == answer(self.tokens, self.count), f"{len(self.tokens)} tokens, {output}"
        return output


@dataclass(slots=True)
class Pair:
    """Dispatches requests as routers do."""

    p: Side
    d: Side
    checks: list[Side] = field(default_factory=list)

    def coordinates(self, transfer_id: bytes) -> dict[str, Any]:
        """What D is told if P has not answered yet."""
        return {
            **DECODE,
            **coordinates(self.p.engine.name, "127.0.0.1", self.p.node.port),
            "transfer_id": transfer_id.hex(),
        }

    def prefill(self, tokens: Sequence[int], transfer_id: bytes, count: int = 1) -> Request:
        """P's leg."""
        return self.p.engine.submit(tokens, count, {**PREFILL, "transfer_id": transfer_id.hex()})

    def decode(self, tokens: Sequence[int], count: int, transfer_id: bytes) -> Request:
        """D's leg, with P's static coordinates."""
        return self.d.engine.submit(tokens, count, self.coordinates(transfer_id))

    def at_once(
        self,
        tokens: list[int],
        count: int = 4,
        *,
        longer: list[int] | None = None,
        d_first: bool = False,
        p_count: int = 1,
    ) -> Legs:
        """Both legs together. `longer` is D's prompt where it is not P's."""
        transfer_id = secrets.token_bytes(16)
        wanted = longer or tokens
        if d_first:
            d = self.decode(wanted, count, transfer_id)
            p = self.prefill(tokens, transfer_id, p_count)
        else:
            p = self.prefill(tokens, transfer_id, p_count)
            d = self.decode(wanted, count, transfer_id)
        return Legs(wanted, count, transfer_id, p, d)

    def in_turn(self, tokens: list[int], count: int = 4, *, longer: list[int] | None = None) -> Legs:
        """P's leg, and when it has answered D's with what P returned."""
        transfer_id = secrets.token_bytes(16)
        p = self.prefill(tokens, transfer_id)
        params = p.result(WAIT).kv_transfer_params
        wanted = longer or tokens
        return Legs(wanted, count, transfer_id, p, self.d.engine.submit(wanted, count, params))

    def moved(self, legs: Legs, external: int) -> None:
        """D's answer is right, and so many of its positions came by transfer; else says why they did not."""
        found = legs.right().external_cached_tokens
        if found != external:
            told = self.d.node.transfers(legs.transfer_id)
            raise AssertionError(f"{found} of {external} positions of {len(legs.tokens)} tokens came: {told}")

    def received(self, transfer_id: bytes) -> admin_pb2.Transfer:
        """D's node's account of a transfer, once it is over."""
        return account(self.d.node, transfer_id)

    def sent(self, transfer_id: bytes) -> admin_pb2.Transfer:
        """P's node's account of a transfer, once it is over."""
        return account(self.p.node, transfer_id)


def account(node: Node, transfer_id: bytes) -> admin_pb2.Transfer:
    """A node's account of a transfer that is over."""

    def ended() -> admin_pb2.Transfer | None:
        found = node.transfers(transfer_id)
        return next((t for t in found if t.half.phase == admin_pb2.PHASE_ENDED), None)

    transfer: admin_pb2.Transfer = eventually(f"{node.name} ends {transfer_id.hex()}", ended)
    return transfer


def phase(node: Node, transfer_id: bytes) -> int | None:
    """Where a transfer stands on a node; None where it is not known."""
    found = node.transfers(transfer_id)
    return found[0].half.phase if found else None


def settle(*sides: Side, wait: float = WAIT) -> None:
    """Waits until everything is given back: engines idle, all blocks in vLLM's pool, daemons hold nothing.

    Raises AssertionError with what is still held, or with what the witness found.
    """
    for side in sides:
        stats = side.engine.idle(wait)
        assert not stats.mismatches, f"{side.engine.name}: {stats.mismatches[:3]}"
    nodes = {side.node.name: side.node for side in sides}
    deadline = time.monotonic() + wait
    while True:
        held = [found for node in nodes.values() if (found := _held(node))]
        if not held:
            # Engines are asked last: each question keeps the ranks of a TP engine spinning for a second.
            held = [found for side in sides if (found := _missing(side, wait))]
        if not held:
            return
        assert time.monotonic() < deadline, f"after {wait:g} s: {'; '.join(held)}"
        time.sleep(0.05)


def _held(node: Node) -> str:
    now = node.status().held
    if now.reservations or now.handoffs or now.quarantined_blocks or now.writes:
        return f"{node.name} holds {' '.join(str(now).split())}"
    return ""


def _missing(side: Side, wait: float) -> str:
    # An idle engine looks at what its daemon said when it is next asked for something.
    side.engine.inspect("testing.clockwork.probes:ask_connector", timeout=wait)
    stats = side.engine.stats(wait)
    if stats.free_blocks != stats.blocks - 1:
        return f"{side.engine.name} has {stats.free_blocks} free of {stats.blocks} blocks"
    return ""
