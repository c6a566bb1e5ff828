# SPDX-License-Identifier: Apache-2.0
"""Why something was refused, or did not end well."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Reason(IntEnum):
    """The machine-readable part; the numbers are those of `kvpush.v1.Reason` (a test compares them)."""

    UNSPECIFIED = 0
    CANCELLED = 1
    PEER_CANCELLED = 2
    EXPIRED = 3
    PEER_UNREACHABLE = 4
    NO_SUCH_ENGINE = 5
    ENGINE_GONE = 6
    STALE_INCARNATION = 7
    LAYOUT_MISMATCH = 8
    FINGERPRINT_MISMATCH = 9
    DUPLICATE = 10
    STALE_ATTEMPT = 11
    POSITIONS_MISSING = 12
    TRANSPORT_FAILED = 13
    MOVER_DIED = 14
    OVER_LIMIT = 15
    DRAINING = 16
    INVALID = 17
    FORBIDDEN = 18
    NOT_WANTED = 19
    FENCED = 20
    UNSUPPORTED = 21
    BAD_MEMORY = 22


@dataclass(frozen=True, slots=True)
class Fault:
    """A refusal, or an end that is not a success: why, and one line for people."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.name.lower()}: {self.detail}" if self.detail else self.reason.name.lower()
