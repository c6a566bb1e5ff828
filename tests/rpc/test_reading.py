# SPDX-License-Identifier: Apache-2.0
"""What is said of bytes that came and can't be a message."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import DecodeError

from kvpushd.errors import Invalid, KvpushError, OverLimit
from kvpushd.rpc import status


class Stream:
    """One whose next message is this, or fails with this."""

    def __init__(self, comes: object) -> None:
        self._comes = comes

    async def read(self) -> object:
        if isinstance(self._comes, Exception):
            raise self._comes
        return self._comes


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DecodeError("Wire format was corrupt"), Invalid),
        (DecodeError("Error parsing message: Arena alloc failed"), OverLimit),
        (MemoryError(), OverLimit),
    ],
    ids=repr,
)
def test_bytes_that_are_no_message_are_invalid_and_what_there_is_no_memory_for_is_too_much(
    error: Exception, reason: type[KvpushError]
) -> None:
    with pytest.raises(reason):
        asyncio.run(status.read(Stream(error)))


def test_an_answer_that_grpc_could_not_read_is_invalid() -> None:
    with pytest.raises(Invalid):
        asyncio.run(status.answered(Stream(None)))
    assert asyncio.run(status.answered(Stream("a message"))) == "a message"
