# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as a tree.

    KvpushError
    ├── Unreachable           the daemon or a peer does not answer
    ├── Refused               understood, and will not be done; says why
    │   ├── Invalid           the message itself is wrong
    │   ├── Forbidden         the caller may not do this
    │   ├── LayoutMismatch    the two pools can't be mapped onto each other
    │   ├── FingerprintMismatch  the two engines' KV does not mean the same
    │   ├── Duplicate         the name, or the key, is taken
    │   ├── StaleIncarnation  from before a restart
    │   ├── Unsupported       protocol versions do not fit
    │   ├── BadMemory         a descriptor can't be accepted
    │   └── OverLimit         admission
    ├── TransportFailed       the data plane reported an error
    ├── MoverDied             the process that maps the memory ended
    └── ConfigError           the configuration is wrong

Each class names its reason on the wire; rpc/status.py maps reasons to gRPC status codes.
"""

from __future__ import annotations

from typing import ClassVar

from kvpush_client.events import Fault, Reason


class KvpushError(Exception):
    """Root of all errors that kvpushd raises on purpose."""

    reason: ClassVar[Reason] = Reason.UNSPECIFIED

    def fault(self) -> Fault:
        """The error as a value."""
        return Fault(self.reason, str(self))


class Unreachable(KvpushError):
    """The daemon or a peer does not answer."""

    reason = Reason.PEER_UNREACHABLE


class Refused(KvpushError):
    """Understood, and will not be done."""


class Invalid(Refused):
    """The message itself is wrong; says what was expected."""

    reason = Reason.INVALID


class Forbidden(Refused):
    """The caller may not do this."""

    reason = Reason.FORBIDDEN


class LayoutMismatch(Refused):
    """The two pools can't be mapped onto each other; names the field and both values."""

    reason = Reason.LAYOUT_MISMATCH


class FingerprintMismatch(Refused):
    """The two engines' KV does not mean the same; names the field and both values."""

    reason = Reason.FINGERPRINT_MISMATCH


class Duplicate(Refused):
    """The name, or the key, is taken; names both."""

    reason = Reason.DUPLICATE


class StaleIncarnation(Refused):
    """From before a restart."""

    reason = Reason.STALE_INCARNATION


class Unsupported(Refused):
    """Protocol versions do not fit."""

    reason = Reason.UNSUPPORTED


class BadMemory(Refused):
    """A descriptor can't be accepted: unsealed, short, read-only, foreign."""

    reason = Reason.BAD_MEMORY


class OverLimit(Refused):
    """Admission: too many, or too much."""

    reason = Reason.OVER_LIMIT


class TransportFailed(KvpushError):
    """The data plane reported an error."""

    reason = Reason.TRANSPORT_FAILED


class MoverDied(KvpushError):
    """The process that maps the memory ended: nothing of it reads or writes a pool any more."""

    reason = Reason.MOVER_DIED


class ConfigError(KvpushError):
    """The configuration is wrong; says which field, what it was, what is allowed."""

    reason = Reason.INVALID
