# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree on."""

from __future__ import annotations

import pytest

from kvpushd.core.fingerprint import check, compare
from kvpushd.errors import FingerprintMismatch, Invalid

MINE = {"model": "a1b2", "kv_dtype": "bf16", "rope": "1e6"}


def test_equal_fingerprints_agree_whatever_their_order() -> None:
    compare(MINE, dict(reversed(MINE.items())))


def test_a_field_that_differs_is_named_with_both_values() -> None:
    with pytest.raises(FingerprintMismatch, match="kv_dtype is 'bf16' here and 'fp8' there"):
        compare(MINE, MINE | {"kv_dtype": "fp8"})


def test_a_field_that_only_one_side_has_is_a_difference() -> None:
    with pytest.raises(FingerprintMismatch, match="adapter is absent here and 'x' there"):
        compare(MINE, MINE | {"adapter": "x"})
    with pytest.raises(FingerprintMismatch, match="adapter is '' here and absent there"):
        compare(MINE | {"adapter": ""}, MINE)


def test_of_many_differences_the_first_are_named_and_the_rest_counted() -> None:
    with pytest.raises(FingerprintMismatch, match=r"^a is .*; b is .*; c is [^;]*; 2 more: "):
        compare({}, dict.fromkeys("edcba", "x"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({str(n): "" for n in range(65)}, "65 fields"),
        ({"": "x"}, "name of 0"),
        ({"x" * 129: ""}, "name of 129"),
        ({"x": "y" * 1025}, "value of 1025"),
    ],
)
def test_a_fingerprint_too_large_to_keep_is_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        check(fields)
