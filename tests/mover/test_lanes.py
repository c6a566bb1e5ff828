# SPDX-License-Identifier: Apache-2.0
"""What is made of the words of UCX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvpushd.mover.lanes import Lanes

SELF = b"[1.2] ucp_worker.c:1997 UCX  INFO    out self cfg#0 rma_am(tcp/lo)  am(tcp/lo tcp/eth0)\n"
NEAR = b"[1.2] ucp_worker.c:1997 UCX  INFO    out intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo tcp/eth0)\n"
FAR = b"[1.2] ucp_worker.c:1997 UCX  INFO    out inter-node cfg#2 rma(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1)\n"
TABLE = b"[1.2]   | out intra-node cfg#1     |\n"
WARNING = b"[1.2] tcp_ep.c:99 UCX  WARN    something is slow\n"


@dataclass
class Log:
    """A log that is written to, and what is left of it for people."""

    said: int
    rest: int
    lanes: Lanes

    def names(self, *said: bytes) -> list[str]:
        for words in said:
            os.write(self.said, words)
        return self.lanes.names()


@pytest.fixture
def log() -> Iterator[Log]:
    (heard, said), (rest, passed_on) = os.pipe(), os.pipe()
    yield Log(said, rest, Lanes(heard, passed_on))
    for fd in (heard, said, rest, passed_on):
        os.close(fd)


def test_what_carries_writes_to_others_is_named_once_and_in_order(log: Log) -> None:
    assert log.names() == []
    assert log.names(SELF, NEAR, TABLE) == ["tcp/lo"]
    assert log.names(FAR, NEAR) == ["tcp/lo", "rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1"]


def test_a_line_may_come_in_pieces(log: Log) -> None:
    assert log.names(NEAR[:70]) == []
    assert log.names(NEAR[70:]) == ["tcp/lo"]


def test_what_is_no_chatter_goes_on_to_people(log: Log) -> None:
    log.names(SELF, WARNING, NEAR)
    assert os.read(log.rest, 4096) == WARNING
