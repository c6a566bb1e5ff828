# SPDX-License-Identifier: Apache-2.0
"""The moments of one transfer, in the order of its life."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush_client._proto import admin_pb2, types_pb2

# Which moment, what happened then, and on whose side it is measured.
_STEPS = (
    ("reserve", "opened_unix_ns", "this side's half was made"),
    ("announce", "matched_unix_ns", "the other half was known"),
    ("first_byte", "first_post_unix_ns", "the first byte was posted"),
    ("first_landed", "first_landed_unix_ns", "the first write landed"),
    ("seal", "sealed_unix_ns", "the last byte was final at the sender"),
    ("landed", "landed_unix_ns", "the last byte landed"),
    ("ended", "ended_unix_ns", "the half ended, its blocks free"),
)
# What only a sender knows first hand.
_SENDERS = frozenset({"first_post_unix_ns", "sealed_unix_ns"})


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a transfer."""

    name: str
    at_unix_ns: int
    clock: str
    """Whose clock: `here`, or `sender`, which may differ from it by what the two hosts' clocks differ."""
    meaning: str


def timeline(one: admin_pb2.Transfer) -> list[Moment]:
    """The moments that are known, in the order of the steps, the first token after `landed`.

    What only the sender knows is taken from its times where this node receives.
    """
    found: list[Moment] = []
    for name, key, meaning in _STEPS:
        if name == "ended" and one.first_token_unix_ns:
            found.append(Moment("first_token", one.first_token_unix_ns, "here", "the first token came out"))
        at, clock = getattr(one.times, key), "here"
        if not one.sending and key in _SENDERS and getattr(one.sender_times, key):
            at, clock = getattr(one.sender_times, key), "sender"
        if at:
            found.append(Moment(name, at, clock, meaning))
    return found


def since_ms(at_unix_ns: int, start_unix_ns: int) -> float:
    """Milliseconds from the one to the other, to the microsecond."""
    return round((at_unix_ns - start_unix_ns) / 1e6, 3)


def times(of: types_pb2.TransferTimes) -> dict[str, int | None]:
    """Moments under their wire names; null where they have not come."""
    return {key: getattr(of, key) or None for _, key, _ in _STEPS}
