# SPDX-License-Identifier: Apache-2.0
"""P's scheduler side, over vLLM's own block pool."""

import pytest
import vllm_kit as kit

from kvpush_client.events import Side, TransferKey
from kvpush_client.vllm.metadata import Progress
from kvpush_client.vllm.prompt import digests
from kvpush_client.vllm.sender import Scheduled, Sender
from kvpush_client.vllm.writers import Writers, Writing

KEY = TransferKey(kit.transfer())
AGAIN = TransferKey(kit.transfer(), 1)


class P:
    """A sender, and what vLLM would do around it."""

    def __init__(self, window=None):
        self.desk = kit.Desk()
        self.blocks = kit.Blocks()
        self.now = 1000.0
        self.requests = {}
        self.sender = Sender(
            self.desk,
            self.blocks.references,
            group_ids=(0,),
            group_sizes=(kit.SIZE,),
            group_windows=(window,),
            lease=None,
            log=kit.LOG,
            clock=lambda: self.now,
        )

    def add(self, request=None, number=1):
        request = request or kit.Request()
        self.requests[request.request_id] = request
        self.sender.add(request, kit.send(number))
        return request

    def step(self, preempted=(), writings=(), synchronous=True, **tokens):
        for request_id in preempted:
            self.requests[request_id].num_computed_tokens = 0
            self.blocks.free(request_id)
        for request_id, count in tokens.items():
            self.blocks.grow(request_id, self.requests[request_id].num_computed_tokens + count)
        writers = Writers(lambda: writings, self.blocks.ids, (0,), (kit.SIZE,), synchronous)
        progress = self.sender.step(Scheduled(tokens, set(preempted), self.blocks.ids, writers))
        for request_id, count in tokens.items():
            self.requests[request_id].num_computed_tokens += count
        return progress

    def finish(self, request_id="r"):
        sent = self.sender.finished(request_id)
        if request_id in self.blocks.tables:
            self.blocks.free(request_id)
        return sent

    def prefill(self, request=None, number=1):
        request = self.add(request, number)
        self.step(**{request.request_id: request.num_prompt_tokens})
        return self.finish(request.request_id)


@pytest.fixture
def p():
    return P()


def test_a_handoff_opens_before_its_request_runs(p):
    p.add()
    assert p.desk.take() == [("handoff", KEY, [], None)]


def test_each_attempt_says_what_prompt_it_is_of_as_it_opens(p):
    tokens = list(range(100))
    p.add(kit.Request(prompt_token_ids=tokens))
    p.step(r=64)
    p.step(preempted=["r"])
    p.step(r=100)
    assert p.desk.prompts == [digests(tokens), (), digests(tokens), ()]


def test_each_chunk_names_its_blocks_and_the_last_one_seals_the_whole_prompt(p):
    p.add()
    p.desk.take()
    assert p.step(r=40) == [Progress(KEY, 0, 40)]
    assert p.step(r=40) == [Progress(KEY, 0, 80)]
    assert p.step(r=20) == [Progress(KEY, 0, 100)]
    ids = p.blocks.ids("r")[0]
    assert p.desk.take() == [
        ("handoff", KEY, [(0, 0, ids[:3])], None),
        ("handoff", KEY, [(0, 48, ids[3:5])], None),
        ("handoff", KEY, [(0, 80, ids[5:7])], 100),
    ]


def test_decode_steps_after_the_seal_say_nothing(p):
    p.add()
    p.step(r=100)
    p.desk.take()
    assert p.step(r=1) == []
    assert p.desk.take() == []


def test_a_step_without_the_request_moves_nothing(p):
    p.add()
    p.desk.take()
    assert p.step() == []
    assert p.desk.take() == []


def test_a_prefix_hit_is_final_before_the_step(p):
    p.add().num_computed_tokens = 48
    assert p.step(r=52) == [Progress(KEY, 48, 100)]


def test_a_hit_on_blocks_that_this_very_step_writes_is_not(p):
    p.add().num_computed_tokens = 48
    p.blocks.grow("r", 48)
    p.blocks.tables["writer"] = p.blocks.tables["r"][:3]  # it computes what r has hit from position 16 on
    assert p.step(writings=[Writing("writer", 16, 48)], r=52) == [Progress(KEY, 16, 100)]


def test_a_hit_is_not_final_before_the_step_where_a_former_step_may_still_run(p):
    p.add().num_computed_tokens = 48
    assert p.step(synchronous=False, r=52) == [Progress(KEY, 0, 100)]


def test_finished_prefill_answers_and_its_blocks_outlive_the_request(p):
    assert p.prefill() == kit.send()
    assert not p.blocks.all_free
    p.sender.on_ended(kit.delivered(KEY))
    assert p.blocks.all_free
    assert len(p.sender) == 0


def test_a_handoff_that_ends_before_its_request_is_answered_all_the_same(p):
    p.add()
    p.step(r=100)
    p.sender.on_ended(kit.delivered(KEY))
    assert p.finish() == kit.send()
    assert p.blocks.all_free


def test_an_abort_before_the_seal_takes_the_handoff_back(p):
    p.add()
    p.step(r=40)
    p.desk.take()
    assert p.finish() is None
    assert p.desk.take() == [("cancel", KEY, Side.SENDER)]
    assert not p.blocks.all_free
    p.sender.on_ended(kit.not_delivered(KEY))
    assert p.blocks.all_free
    assert len(p.sender) == 0


def test_an_abort_after_the_seal_lets_it_go_on(p):
    p.add()
    p.step(r=100)
    p.desk.take()
    p.finish()
    assert p.desk.take() == []


def test_a_preempted_attempt_keeps_its_blocks_while_the_next_starts_from_the_beginning(p):
    p.add()
    p.step(r=40)
    old = set(p.blocks.ids("r")[0])
    p.desk.take()
    p.step(preempted=["r"])
    assert p.desk.take() == [("handoff", AGAIN, [], None)]
    assert p.step(r=100) == [Progress(AGAIN, 0, 100)]
    new = p.blocks.ids("r")[0]
    assert p.desk.take() == [("handoff", AGAIN, [(0, 0, new)], 100)]
    assert not old & set(new)
    p.sender.on_ended(kit.not_delivered(KEY))
    assert p.finish() == kit.send()
    p.sender.on_ended(kit.delivered(AGAIN))
    assert p.blocks.all_free
    assert len(p.sender) == 0


def test_a_request_preempted_and_resumed_in_one_step_starts_its_next_attempt_in_it(p):
    p.add()
    p.step(r=40)
    assert p.step(preempted=["r"], r=60) == [Progress(AGAIN, 0, 60)]


def test_a_preemption_after_the_seal_changes_nothing(p):
    p.add()
    p.step(r=100)
    p.desk.take()
    assert p.step(preempted=["r"], r=101) == []
    assert p.desk.take() == []


def test_a_live_duplicate_is_not_handed_off(p):
    p.prefill(kit.Request("first"))
    p.desk.take()
    assert p.prefill(kit.Request("second")) is None
    assert p.desk.take() == []


def test_without_a_daemon_p_serves_and_answers_nothing(p):
    p.desk.ready = False
    assert p.prefill() is None
    assert p.desk.take() == []
    assert p.blocks.all_free


def test_a_handoff_that_failed_is_not_answered(p):
    p.add()
    p.step(r=40)
    p.sender.on_ended(kit.not_delivered(KEY))
    assert p.step(r=60) == []
    assert p.finish() is None
    assert p.blocks.all_free


def test_a_prompt_of_one_token_has_nothing_to_hand_off(p):
    assert p.prefill(kit.Request(num_prompt_tokens=1)) is None
    assert p.desk.take() == []


@pytest.mark.parametrize("computed", [40, 100], ids=["cancelled", "sealed"])
def test_the_engine_goes_on_while_an_ended_requests_handoff_holds_blocks(p, computed):
    p.add()
    p.step(r=computed)
    assert not p.sender.moving  # the request itself keeps vLLM going
    p.finish()
    assert p.sender.moving
    p.sender.on_ended(kit.not_delivered(KEY))
    assert not p.sender.moving


def test_the_engine_does_not_go_on_for_ever_where_the_daemon_says_nothing(p):
    p.prefill()
    p.now += 299
    assert p.sender.moving
    p.now += 2
    assert not p.sender.moving


def test_the_engine_goes_on_while_a_former_attempt_of_an_ended_request_holds_blocks(p):
    p.add()
    p.step(r=40)
    p.step(preempted=["r"])
    p.finish()
    p.sender.on_ended(kit.not_delivered(AGAIN))
    assert p.sender.moving
    p.sender.on_ended(kit.not_delivered(KEY))
    assert not p.sender.moving


def test_what_lacks_blocks_waits_a_moment_and_not_for_as_long_as_others_leave(p):
    waited = []
    for number in range(1, 15):
        leave(p, number)
        p.now += 0.09375
        for _ in range(3):  # each of some requests asks
            waited.append(p.sender.freeing)
    assert waited == [True] * 33 + [False] * 9
    p.now += 0.25  # there were blocks for all
    assert p.sender.freeing


def test_short_waits_with_enough_blocks_between_them_are_not_one_long_wait(p):
    for number in range(1, 20):
        leave(p, number)
        assert p.sender.freeing
        p.now += 0.25


def leave(p, number=1):
    """A request ends whose handoff is under way."""
    p.prefill(kit.Request(f"r{number}", num_prompt_tokens=16), number)
    p.sender.on_matched(kit.came(TransferKey(kit.transfer(number))))


def test_of_a_window_only_what_a_receiver_wants_is_named_and_held():
    p = P(window=32)
    p.add(kit.Request(num_prompt_tokens=400))
    p.desk.take()
    first = 240  # 400 - 32, and 128 before that for a receiver whose blocks are larger
    for said in ([("handoff", KEY, [(0, first, [])], None)], []):
        p.step(r=100)
        assert len(p.blocks.references) == 0
        assert p.desk.take() == said
    p.step(r=100)
    p.step(r=100)
    ids = p.blocks.ids("r")[0]
    assert p.desk.take() == [
        ("handoff", KEY, [(0, first, ids[15:19])], None),
        ("handoff", KEY, [(0, 304, ids[19:])], 400),
    ]
    assert len(p.blocks.references) == 10


def test_a_prompt_within_its_window_is_named_as_a_whole():
    p = P(window=64)
    p.add(kit.Request(num_prompt_tokens=70))
    p.desk.take()
    p.step(r=70)
    assert p.desk.take() == [("handoff", KEY, [(0, 0, p.blocks.ids("r")[0])], 70)]


def test_a_preemption_waits_a_moment_for_blocks_that_are_about_to_be_freed(p):
    p.prefill()
    p.sender.on_matched(kit.came(KEY))
    states = [p.sender.freeing]
    p.now += 2
    states.append(p.sender.freeing)
    assert states == [True, False]


def test_null_blocks_are_neither_named_nor_held(p):
    p.add().num_computed_tokens = 48
    null = p.blocks.pool.null_block
    p.blocks.tables["r"] = [null, null, *p.blocks.grow("other", 80)]
    before = null.ref_cnt
    p.desk.take()
    p.step(r=52)
    [(_, _, [(_, start, ids)], _)] = p.desk.take()
    assert start == 32
    assert ids == p.blocks.ids("other")[0]
    assert null.ref_cnt == before
