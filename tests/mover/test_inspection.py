# SPDX-License-Identifier: Apache-2.0
"""Checksums of what has landed: what the two ends say to one another, with nothing between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Runs
from kvpushd.mover.transport import inspection, notices
from kvpushd.mover.transport.base import INSPECTED_BYTES, INSPECTED_RUNS
from kvpushd.mover.transport.inspection import Inspections, inspected
from kvpushd.mover.transport.notices import NO_SUM, Added, Inspect

POOL = 1 << 16
PLACE = 0x7F00_0000_1000


class Ends:
    """A sender's inspections, and a receiver's pool in which all that was sent has landed."""

    def __init__(self) -> None:
        self.source = np.frombuffer(np.random.default_rng(1).bytes(POOL), np.uint8)
        self.target = self.source.copy()
        self.said: list[Inspect] = []
        self.inspections = Inspections()

    def add(self, write_id: int, runs: list[tuple[int, int]], pool: int = PLACE) -> None:
        """Asks for an inspection of runs that are in the same places on both sides."""
        offsets, lengths = np.array(runs, np.int64).T
        self.inspections.add(write_id, self.source, pool, Runs(offsets, offsets, lengths))

    def answer(self) -> tuple[int, Fault | None]:
        """Lets the receiver answer, and says how the first of them ended."""
        assert self.inspections.step(self.said.append) is None
        asked = notices.read(bytes(self.said.pop()))
        assert isinstance(asked, Inspect)
        self.inspections.hear(inspected(asked, {PLACE: self.target}))
        ended = self.inspections.step(self.said.append)
        assert ended is not None
        return ended.write_id, ended.fault


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(0, POOL - 1), st.data())
def test_a_byte_that_differs_is_found_where_it_was_sent_and_nowhere_else(
    cells: set[int], wrong: int, data: st.DataObject
) -> None:
    ends = Ends()
    ends.target[wrong] ^= 1 << data.draw(st.integers(0, 7))
    order = data.draw(st.permutations(sorted(cells)))
    ends.add(5, [(cell * 1024, 1024) for cell in order])
    ended, fault = ends.answer()
    assert ended == 5
    assert (fault and fault.reason) == (Reason.CORRUPTED if wrong // 1024 in cells else None)


def test_runs_that_changed_places_are_found() -> None:
    ends = Ends()
    ends.target[:1024], ends.target[1024:2048] = ends.source[1024:2048], ends.source[:1024]
    ends.add(1, [(0, 1024), (1024, 1024)])
    _, fault = ends.answer()
    assert fault is not None
    assert (fault.reason, "0 to 2,048" in fault.detail) == (Reason.CORRUPTED, True)


def test_they_are_asked_for_one_by_one_and_an_answer_to_another_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends()
    ends.add(1, [(0, 64)])
    ends.add(2, [(64, 64)])
    assert ends.inspections.step(ends.said.append) is None
    assert ends.inspections.step(ends.said.append) is None
    assert len(ends.said) == 1
    ends.inspections.hear(Added(12345, 0))
    assert ends.inspections.step(ends.said.append) is None
    monkeypatch.setattr(inspection, "AGAIN_SECONDS", 0.0)
    assert ends.inspections.step(ends.said.append) is None
    assert ends.said[0] == ends.said[1], "it is asked again where no answer comes"
    assert ends.inspections.write_ids == [1, 2]


def test_one_that_is_never_answered_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    ends.add(1, [(0, 64)])
    ends.add(2, [(64, 64)])
    assert ends.inspections.step(ends.said.append) is None
    monkeypatch.setattr(inspection, "PATIENCE", 0.0)
    ended = ends.inspections.step(ends.said.append)
    assert ended is not None
    assert ended.fault is not None
    assert (ended.write_id, ended.fault.reason) == (1, Reason.TRANSPORT_FAILED)
    monkeypatch.undo()
    assert ends.answer() == (2, None)


WRONG = {
    "another pool": (PLACE + 1, [(0, 64)]),
    "beyond the pool": (PLACE, [(POOL - 32, 64)]),
    "before the pool": (PLACE, [(-64, 64)]),
    "too long": (PLACE, [(0, INSPECTED_BYTES + 1)]),
    "too many": (PLACE, [(0, 1)] * (INSPECTED_RUNS + 1)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_not_there_to_be_inspected_fails_and_says_so(
    wrong: tuple[int, list[tuple[int, int]]],
) -> None:
    ends = Ends()
    ends.add(1, wrong[1], wrong[0])
    _, fault = ends.answer()
    assert fault is not None
    assert (fault.reason, "inspect" in fault.detail) == (Reason.TRANSPORT_FAILED, True)


@given(st.integers(0, NO_SUM - 1), st.sampled_from([PLACE, 0]), st.binary(max_size=200))
def test_nonsense_has_no_sum_or_that_of_bytes_of_the_pool(number: int, pool: int, rows: bytes) -> None:
    target = np.zeros(POOL, np.uint8)
    answer = inspected(Inspect(number, pool, rows), {PLACE: target})
    assert answer.number == number
    assert answer.checksum == NO_SUM or answer.checksum < 1 << 32
