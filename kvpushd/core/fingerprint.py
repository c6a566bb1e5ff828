# SPDX-License-Identifier: Apache-2.0
"""What must be equal on both sides for KV to mean the same."""

from __future__ import annotations

from collections.abc import Mapping

from kvpushd.errors import FingerprintMismatch, Invalid

MAX_FIELDS = 64
MAX_NAME = 128
MAX_VALUE = 1024

# A refusal is one line for people: the first fields that differ say enough.
_NAMED = 3


def check(fields: Mapping[str, str]) -> None:
    """Return if a fingerprint is of a size that can be kept and compared. Raises Invalid."""
    if len(fields) > MAX_FIELDS:
        raise Invalid(f"fingerprint has {len(fields)} fields, expected {MAX_FIELDS} or fewer")
    for name, value in fields.items():
        if not 1 <= len(name) <= MAX_NAME:
            raise Invalid(
                f"fingerprint field {name[:MAX_NAME]!r}: name of {len(name)}, expected 1 to {MAX_NAME}"
            )
        if len(value) > MAX_VALUE:
            raise Invalid(
                f"fingerprint field {name!r}: value of {len(value)} characters, expected {MAX_VALUE} or "
                "fewer: put a hash of it there"
            )


def compare(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Return if both sides have the same fields with the same values.

    A field that only one side has is a difference: what one side thinks worth saying may matter.

    Raises FingerprintMismatch, naming the first fields that differ, by name, and both values.
    """
    names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if not names:
        return
    said = "; ".join(
        f"{name} is {_said(mine, name)} here and {_said(theirs, name)} there" for name in names[:_NAMED]
    )
    more = f"; {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise FingerprintMismatch(
        f"{said}{more}: where these differ, the KV of one engine means nothing in the other"
    )


def _said(fields: Mapping[str, str], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"
