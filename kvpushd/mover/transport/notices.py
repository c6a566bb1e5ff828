# SPDX-License-Identifier: Apache-2.0
"""What two agents tell each other beside the bytes, as NIXL's notifications.

    the sender            the receiver
    hello      ---------> has a dock that nobody else packs for
               <--------- welcome
    (a parcel, written)
    bell       ---------> unpacks it
               <--------- unpacked, or refused
    inspect    ---------> adds up what has landed
               <--------- added

A hello has a token that only who was given the inlet's metadata can work out, and what the receiver needs to
answer. Who knows none of this ignores it, and no parcel is packed for it. Without a dock nobody is welcome,
but what has landed is inspected.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_TOKEN_BYTES = 16
_HELLO, _WELCOME, _BELL, _UNPACKED, _REFUSED = b"kvp1hell", b"kvp1welc", b"kvp1bell", b"kvp1done", b"kvp1refu"
_INSPECT, _ADDED = b"kvp1insp", b"kvp1adds"
_KIND_BYTES = 8
_LANDING = struct.Struct("<QQQ")
_PAIR = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks whether parcels are taken in, with the inlet's token, and says how the asking agent is reached."""

    token: bytes
    metadata: bytes

    def __bytes__(self) -> bytes:
        return _HELLO + self.token + self.metadata


@dataclass(frozen=True, slots=True)
class Welcome:
    """They are: the address of the dock's first slot, how many there are, how large."""

    address: int
    slots: int
    slot_bytes: int

    def __bytes__(self) -> bytes:
        return _WELCOME + _LANDING.pack(self.address, self.slots, self.slot_bytes)


@dataclass(frozen=True, slots=True)
class Bell:
    """The parcel of that number is in its slot."""

    slot: int
    number: int

    def __bytes__(self) -> bytes:
        return _BELL + _PAIR.pack(self.slot, self.number)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """All of that parcel is in its pool, or, where it is refused, nothing of it."""

    slot: int
    number: int
    refused: bool = False

    def __bytes__(self) -> bytes:
        return (_REFUSED if self.refused else _UNPACKED) + _PAIR.pack(self.slot, self.number)


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks for the checksum of runs of the pool at that address; `rows` has their offsets, then lengths."""

    number: int
    pool: int
    rows: bytes

    def __bytes__(self) -> bytes:
        return _INSPECT + _PAIR.pack(self.number, self.pool) + self.rows


@dataclass(frozen=True, slots=True)
class Added:
    """It is this; or NO_SUM, where there are no such runs."""

    number: int
    checksum: int

    def __bytes__(self) -> bytes:
        return _ADDED + _PAIR.pack(self.number, self.checksum)


NO_SUM = 1 << 63
"""What no checksum is."""

Notice = Hello | Welcome | Bell | Unpacked | Inspect | Added


def read(message: bytes) -> Notice | None:
    """What a notification says; None where it is none of these."""
    kind, rest = message[:_KIND_BYTES], message[_KIND_BYTES:]
    if kind == _HELLO and len(rest) > _TOKEN_BYTES:
        return Hello(rest[:_TOKEN_BYTES], rest[_TOKEN_BYTES:])
    if kind == _WELCOME and len(rest) == _LANDING.size:
        return Welcome(*_LANDING.unpack(rest))
    if kind == _BELL and len(rest) == _PAIR.size:
        return Bell(*_PAIR.unpack(rest))
    if kind in (_UNPACKED, _REFUSED) and len(rest) == _PAIR.size:
        slot, number = _PAIR.unpack(rest)
        return Unpacked(slot, number, refused=kind == _REFUSED)
    if kind == _INSPECT and len(rest) > _PAIR.size:
        number, pool = _PAIR.unpack(rest[: _PAIR.size])
        return Inspect(number, pool, rest[_PAIR.size :])
    if kind == _ADDED and len(rest) == _PAIR.size:
        return Added(*_PAIR.unpack(rest))
    return None


def token_of(metadata: bytes) -> bytes:
    """The token of the inlet that this metadata is of."""
    return hashlib.sha256(metadata).digest()[:_TOKEN_BYTES]
