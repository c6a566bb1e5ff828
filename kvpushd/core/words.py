# SPDX-License-Identifier: Apache-2.0
"""The values that events and instructions are made of.

Time is an `Instant`: nanoseconds of the node's monotonic clock, which engines and movers of the node share.
Peers are told apart by a `LinkId`; the link to oneself is `LOCAL`, and what is said on it never leaves the
ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from kvpush_client.events import TransferKey
from kvpushd.core.layout import Layout

Instant = int
Incarnation = NewType("Incarnation", bytes)
LinkId = NewType("LinkId", str)
WriteId = NewType("WriteId", int)

HalfKey = tuple[Incarnation, TransferKey]
"""A half, among all of the node's of its side."""
Transfer = tuple[Incarnation, bytes]
"""All attempts of one transfer, of one engine."""
ReceiverKey = tuple[LinkId, Incarnation]
"""A receiving engine as it speaks on a link; also the inlet at the link's other end."""
TargetKey = tuple[LinkId, Incarnation, TransferKey]
"""A reservation, as the sending side sees it."""

LOCAL = LinkId("local")
SECOND: Instant = 1_000_000_000


class Phase(Enum):
    """Where a half stands; derived, never stored."""

    OPEN = "open"
    MATCHED = "matched"
    MOVING = "moving"
    FENCING = "fencing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SenderAddress:
    """The engine that is to send, and the link on which its daemon is (or will be) reached."""

    engine_id: str
    link: LinkId


@dataclass(frozen=True, slots=True)
class ReceiverView:
    """A receiving engine as the sending side knows it: what it means and how its pools are cut."""

    engine_id: str
    incarnation: Incarnation
    fingerprint: Mapping[str, str]
    world_size: int
    pools: Mapping[int, Layout]
    node: str = ""
    """The node that presents it; empty where that is this one."""


@dataclass(frozen=True, slots=True)
class Times:
    """Moments of one half; 0 = not yet."""

    opened: Instant = 0
    matched: Instant = 0
    first_post: Instant = 0
    first_landed: Instant = 0
    sealed: Instant = 0
    landed: Instant = 0
    ended: Instant = 0
