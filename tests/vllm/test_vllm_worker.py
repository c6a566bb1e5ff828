# SPDX-License-Identifier: Apache-2.0
"""The worker side: what a step makes final, and who is reported."""

import pytest
import vllm_kit as kit

from kvpush_client.events import Disconnected, Fault, Reason, TransferKey
from kvpush_client.vllm.metadata import Progress, Step
from kvpush_client.vllm.worker import WorkerSide

KEY = TransferKey(kit.transfer())
LAYERS = [f"model.layers.{i}.attn" for i in range(4)]


class Worker:
    def __init__(self, layer_groups=2):
        self.desk = kit.Desk()
        self.side = WorkerSide(self.desk, LAYERS, layer_groups, kit.LOG)

    def step(self, step=None, layers=LAYERS, events=()):
        """A whole step; the requests that it reports: finished, failed."""
        self.side.begin(step or Step())
        for layer in layers:
            self.side.layer_done(layer)
        self.side.forward_done()
        self.desk.events.extend(events)
        results = self.side.results()
        return results.finished, results.failed


@pytest.fixture
def worker():
    return Worker()


def test_a_hit_is_said_before_the_forward_and_each_part_of_the_layers_as_it_is_done(worker):
    worker.step(Step(progress=[Progress(KEY, 32, 99)]))
    assert worker.desk.take() == [
        ("advance", KEY, 32, 0, None),
        ("advance", KEY, 99, 0, 2),
        ("advance", KEY, 99, 0, None),
    ]


def test_layers_that_no_hook_named_are_covered_after_the_forward(worker):
    worker.step(Step(progress=[Progress(KEY, 0, 99)]), layers=[])
    assert worker.desk.take() == [("advance", KEY, 99, 0, None)]


def test_layers_out_of_order_are_not_said_until_the_end(worker):
    worker.step(Step(progress=[Progress(KEY, 0, 99)]), layers=reversed(LAYERS))
    assert worker.desk.take() == [("advance", KEY, 99, 0, None)]


def test_a_step_without_handoffs_says_nothing(worker):
    worker.step()
    assert worker.desk.take() == []


def fail_in_the_forward(side):
    side.begin(Step(progress=[Progress(KEY, 0, 99)]))
    try:
        raise RuntimeError("the forward failed")
    finally:
        side.forward_done()


def test_a_forward_that_raises_makes_nothing_final(worker):
    with pytest.raises(RuntimeError):
        fail_in_the_forward(worker.side)
    assert worker.desk.take() == []


def test_an_exception_that_the_caller_handles_meanwhile_is_no_failed_forward(worker):
    try:
        raise KeyError("something else, long before")
    except KeyError:
        worker.step(Step(progress=[Progress(KEY, 0, 99)]), layers=[])
    assert worker.desk.words() == ["advance"]


def test_an_arrival_is_reported_once(worker):
    worker.step(Step(waits=[(KEY, "r")]))
    assert worker.step(events=[kit.landed(KEY)]) == ({"r"}, set())
    assert worker.step(Step(ends=[(KEY, None)]), events=[kit.landed(KEY)]) == (set(), set())


def test_a_failure_is_reported_in_the_same_output(worker):
    worker.step(Step(waits=[(KEY, "r")]))
    assert worker.step(events=[kit.failed(KEY, released=False)]) == ({"r"}, {"r"})


def test_an_arrival_before_the_wait_is_reported_when_the_scheduler_says_it(worker):
    assert worker.step(events=[kit.landed(KEY)]) == (set(), set())
    assert worker.step(Step(waits=[(KEY, "r")])) == (set(), set())
    assert worker.step(Step(ends=[(KEY, None)])) == ({"r"}, set())


def test_a_wait_and_its_end_may_come_in_one_step(worker):
    assert worker.step(Step(waits=[(KEY, "r")], ends=[(KEY, None)])) == ({"r"}, set())


def test_an_aborted_request_is_reported_by_the_schedulers_word(worker):
    worker.step(Step(waits=[(KEY, "r")]))
    aborted = Fault(Reason.CANCELLED, "aborted")
    assert worker.step(Step(ends=[(KEY, aborted)])) == ({"r"}, {"r"})
    assert worker.step(events=[kit.failed(KEY, released=True)]) == (set(), set())


def test_a_lost_daemon_fails_all_that_wait_and_nothing_twice(worker):
    worker.step(Step(waits=[(KEY, "r")]))
    assert worker.step(events=[Disconnected("killed")]) == ({"r"}, {"r"})
    assert worker.step(Step(ends=[(KEY, Fault(Reason.PEER_UNREACHABLE, ""))])) == (set(), set())


def test_a_wait_outlives_a_daemons_absence_that_was_before_it(worker):
    """Of an idle engine: its workers look at what the daemon says in steps only."""
    worker.desk.events = [Disconnected("upgraded"), kit.back()]
    assert worker.step(Step(waits=[(KEY, "r")])) == (set(), set())
    assert worker.step(events=[kit.landed(KEY)]) == ({"r"}, set())


def test_waits_of_before_a_daemons_absence_fail_beside_one_that_begins_after_it(worker):
    other = TransferKey(kit.transfer(2))
    worker.step(Step(waits=[(KEY, "r")]))
    worker.desk.events = [Disconnected("upgraded"), kit.back()]
    assert worker.step(Step(waits=[(other, "s")])) == ({"r"}, {"r"})
    assert worker.step(events=[kit.landed(other)]) == ({"s"}, set())


def test_what_had_landed_before_the_daemon_went_away_has_landed(worker):
    worker.step(Step(waits=[(KEY, "r")]))
    worker.desk.events = [kit.landed(KEY), Disconnected("drained")]
    assert worker.step() == ({"r"}, set())


def test_what_arrived_before_the_step_that_begins_its_wait_is_reported_in_it(worker):
    worker.desk.events = [kit.landed(KEY)]
    assert worker.step(Step(waits=[(KEY, "r")])) == ({"r"}, set())


def test_a_wait_that_begins_without_a_daemon_fails_at_once(worker):
    worker.desk.ready = False
    assert worker.step(Step(waits=[(KEY, "r")])) == ({"r"}, {"r"})
