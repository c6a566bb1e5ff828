# SPDX-License-Identifier: Apache-2.0
"""Paired rounds of contenders, of which one may never answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.engine.contenders import KVPUSHD, PULL, PUSH, PUSH_SEQUENTIAL, Contender
from benchmarks.engine.pair import Pair
from benchmarks.engine.stage import Play, Stage, Turn
from benchmarks.engine.trial import Sample
from benchmarks.report.values import Job


class Second:
    """A turn that took one."""

    samples: Sequence[Sample] = ()

    def values(self) -> dict[str, float]:
        return {"ttft_s": 1.0}


class Bare(Stage):
    """No engines: its contenders answer, but for one in its second round."""

    def __init__(self, folder: Path, silent: Contender) -> None:
        self.job = Job(3, True, frozenset(), folder, lambda text: None)
        self.rows, self.chosen, self.silent = [], [], silent

    def _turn(self, contender: Contender, play: Play, number: int) -> Turn:
        if contender == self.silent and number == 1:
            raise TimeoutError("no output after 240 s")
        return Second()


def play(pair: Pair, contender: Contender, number: int) -> Turn:
    raise NotImplementedError


ALL = (KVPUSHD, PULL, PUSH, PUSH_SEQUENTIAL)


def test_a_family_that_does_not_answer_is_left_out_and_the_others_are_compared(tmp_path: Path) -> None:
    stage = Bare(tmp_path, PUSH)
    rounds = stage.rounds("e", ALL, play)
    assert list(rounds.trials) == [KVPUSHD.name, PULL.name]
    assert rounds.ratio("ttft_s", PULL, KVPUSHD).value == 1.0
    assert {row.contender for row in stage.rows} == {KVPUSHD.name, PULL.name}
    assert [said for said in stage.chosen if "in round 2 push left a request without an answer" in said]


def test_kvpushd_is_never_left_out(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        Bare(tmp_path, KVPUSHD).rounds("e", ALL, play)
