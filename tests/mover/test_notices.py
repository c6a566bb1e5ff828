# SPDX-License-Identifier: Apache-2.0
"""What agents tell each other about parcels is read as it was written, and nonsense is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpushd.mover.transport import notices
from kvpushd.mover.transport.notices import Added, Bell, Hello, Inspect, Notice, Unpacked, Welcome

words = st.integers(0, (1 << 64) - 1)
every_notice = st.one_of(
    st.builds(Hello, st.binary(min_size=16, max_size=16), st.binary(min_size=1)),
    st.builds(Welcome, words, words, words),
    st.builds(Bell, words, words),
    st.builds(Unpacked, words, words, st.booleans()),
    st.builds(Inspect, words, words, st.binary(min_size=1)),
    st.builds(Added, words, words),
)


@given(every_notice)
def test_a_notice_is_read_as_it_was_written(notice: Notice) -> None:
    assert notices.read(bytes(notice)) == notice


@given(every_notice, st.data())
def test_what_is_cut_short_or_too_long_is_none_or_has_another_length(
    notice: Notice, data: st.DataObject
) -> None:
    said = bytes(notice)
    for wrong in (said[: data.draw(st.integers(0, len(said) - 1))], said + b"x"):
        assert notices.read(wrong) is None or isinstance(notice, Hello | Inspect)


@given(st.binary())
def test_anything_else_is_nothing(said: bytes) -> None:
    assert notices.read(said) is None or said.startswith(b"kvp1")


@pytest.mark.parametrize("metadata", [b"", b"another inlet"])
def test_who_has_not_the_metadata_has_not_the_token(metadata: bytes) -> None:
    assert notices.token_of(metadata) != notices.token_of(b"the inlet")
