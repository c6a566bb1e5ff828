# SPDX-License-Identifier: Apache-2.0
"""Sizes and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

NONE = "-"


def size(count: int) -> str:
    """Bytes with a binary unit: `0 B`, `96.0 KiB`, `1.5 GiB`."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def duration_ms(milliseconds: float | None) -> str:
    """Milliseconds with a fitting unit: `0.4 ms`, `82 ms`, `4.1 s`, `3 min 5 s`, `2 h 7 min`, `3 d 4 h`."""
    if milliseconds is None:
        return NONE
    if milliseconds < 10:
        return f"{milliseconds:.1f} ms"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    seconds = int(milliseconds) // 1000
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def moment(unix_ns: int) -> str:
    """A moment in UTC, to the second; `-` for 0."""
    if not unix_ns:
        return NONE
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def count(number: int) -> str:
    """A number with its thousands set apart."""
    return f"{number:,}"


def yes(value: bool) -> str:
    """`yes` or `no`."""
    return "yes" if value else "no"
