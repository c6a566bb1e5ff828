# SPDX-License-Identifier: Apache-2.0
"""A listener, what is said to it, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import grpc
from hypothesis import strategies as st

from testing.node import DEADLINE

Saying = Sequence[bytes]
REASON_KEY = "kvpush-reason"
CORPUS = Path(__file__).parents[1] / "corpus"
BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
"""What no answer to nonsense is: an exception of ours, a hang, a daemon that is gone."""


class Door(Protocol):
    """One listener."""

    name: str

    def sayings(self) -> st.SearchStrategy[Saying]:
        """What may be said."""

    def say(self, said: Saying) -> None:
        """Says it, waits for the end. Raises AssertionError where that is not an end with a reason."""


def corpus(door: str) -> list[Path]:
    """The entries of a door: hexadecimal, a message a line, after # what it is about."""
    return sorted((CORPUS / door).glob("*.txt"))


def read(entry: Path) -> list[bytes]:
    """What an entry says."""
    lines = (line.partition("#")[0].strip() for line in entry.read_text().splitlines())
    return [b"" if line == "-" else bytes.fromhex(line) for line in lines if line]


def shown(said: Saying) -> str:
    """As an entry of the corpus would have it."""
    return "\n".join(message.hex() or "-" for message in said)


def check(error: grpc.RpcError) -> None:
    """An end of a call that says why."""
    assert isinstance(error, grpc.Call)
    reason = dict(error.trailing_metadata() or ()).get(REASON_KEY, "")
    assert error.details(), error
    assert error.code() not in BAD or reason not in ("", "UNSPECIFIED"), error


def stream(target: str, method: str, said: Saying) -> None:
    """Says messages on a stream and ends it; whatever is answered is taken."""
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(method)(iter(said), timeout=DEADLINE)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            check(error)
