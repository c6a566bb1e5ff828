# SPDX-License-Identifier: Apache-2.0
"""The account of one prompt: what came out, where its KV came from, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpush_client._proto import admin_pb2
from kvpushctl.printer import Record
from kvpushctl.timeline import timeline

PHASES = ("reserve", "announce", "first_byte", "seal", "landed", "first_token")


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that was answered, before the books are read."""

    about: str
    prompt_tokens: int
    output: tuple[int, ...]
    expected: tuple[int, ...]
    transfer_id: str
    """Empty where the router did not disaggregate it."""
    sent_unix_ns: int
    cached_tokens: int
    """By D's own count: positions that it did not compute, found in its cache or received."""
    local_tokens: int | None
    """By D's own count: positions found in its cache; None where several requests were in flight."""


@dataclass(frozen=True, slots=True)
class Account:
    """A prompt with its books. Times are milliseconds since the request was sent."""

    about: str
    prompt_tokens: int
    output_equal: bool
    local_tokens: int
    external_tokens: int
    recomputed_tokens: int
    """Positions that should have come from outside and did not."""
    own_tokens: int
    """Positions that the connector lets D compute itself: the last, and up to a block where that is all."""
    bytes_pushed: int
    chunks: int
    chunks_before_seal: int
    phases_ms: Mapping[str, float]
    transfer_id: str
    fault: str

    def record(self) -> Record:
        """Under its JSON names."""
        return {
            "about": self.about,
            "prompt_tokens": self.prompt_tokens,
            "output_equal": self.output_equal,
            "local_tokens": self.local_tokens,
            "external_tokens": self.external_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "own_tokens": self.own_tokens,
            "bytes_pushed": self.bytes_pushed,
            "chunks": self.chunks,
            "chunks_before_seal": self.chunks_before_seal,
            "phases_ms": dict(self.phases_ms),
            "transfer_id": self.transfer_id or None,
            "fault": self.fault or None,
        }


def owed(prompt_tokens: int, local_tokens: int, block: int) -> int:
    """Positions that must come from outside: all that D lacks minus the last, or none if it lacks a block."""
    lacking = prompt_tokens - local_tokens
    return 0 if lacking <= block else lacking - 1


def settle(
    asked: Asked,
    block: int,
    received: Sequence[admin_pb2.Transfer],
    sent: Sequence[admin_pb2.Transfer],
) -> Account:
    """The account of a prompt, with what D's daemon (`received`) and P's (`sent`) say of its transfer."""
    local = asked.local_tokens
    if local is None:
        # With several requests in flight D's totals tell no one's share; where the reservation that landed
        # begins does. Where none landed, all that was not computed came from D's own cache.
        landed = [one for one in received if not one.HasField("fault")]
        local = landed[-1].half.start if landed else asked.cached_tokens
    external = asked.cached_tokens - local
    due = owed(asked.prompt_tokens, local, block)
    recomputed = max(0, due - external)
    faults = [one.fault.detail for one in (*received, *sent) if one.HasField("fault") and recomputed]
    return Account(
        about=asked.about,
        prompt_tokens=asked.prompt_tokens,
        output_equal=asked.output == asked.expected,
        local_tokens=local,
        external_tokens=external,
        recomputed_tokens=recomputed,
        own_tokens=asked.prompt_tokens - local - external - recomputed,
        bytes_pushed=sum(one.counts.bytes for one in sent),
        chunks=sum(one.counts.chunks for one in sent),
        chunks_before_seal=sum(one.counts.chunks_before_seal for one in sent),
        phases_ms=_phases(received[-1], asked.sent_unix_ns) if received else {},
        transfer_id=asked.transfer_id,
        fault="; ".join(dict.fromkeys(faults)),
    )


def _phases(received: admin_pb2.Transfer, sent_unix_ns: int) -> dict[str, float]:
    # Both daemons run on this host, so that the sender's moments are by the same clock.
    at = {moment.name: moment.at_unix_ns for moment in timeline(received)}
    return {name: round((at[name] - sent_unix_ns) / 1e6, 3) for name in PHASES if name in at}
