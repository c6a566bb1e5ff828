# SPDX-License-Identifier: Apache-2.0
"""D's scheduler side, over vLLM's own block pool."""

import pytest
import vllm_kit as kit

from kvpush_client.events import Side, TransferKey
from kvpush_client.vllm.prompt import digest
from kvpush_client.vllm.receiver import Receiver

KEY = TransferKey(kit.transfer())


class D:
    """A receiver, and what vLLM would do around it."""

    def __init__(self, recompute=True, groups=(kit.SIZE,)):
        self.desk = kit.Desk()
        self.blocks = kit.Blocks()
        self.now = 100.0
        self.receiver = Receiver(
            self.desk,
            self.blocks.references,
            group_ids=range(len(groups)),
            group_sizes=groups,
            lease=None,
            recompute=recompute,
            log=kit.LOG,
            clock=lambda: self.now,
        )

    def ask(self, request=None, number=1, computed=0):
        self.request = request or kit.Request()
        self.receiver.add(self.request, kit.receive(number))
        return self.receiver.wanted(self.request.request_id, computed)

    def allocate(self, external, computed=0):
        request_id = self.request.request_id
        table = self.blocks.grow(request_id, computed + external)
        self.receiver.allocated(request_id, (table,), external)
        return [block.block_id for block in table]

    def reserve(self, request=None, number=1):
        return self.allocate(self.ask(request, number))

    def free(self):
        """vLLM ends the request."""
        self.receiver.finished(self.request.request_id)
        self.blocks.free(self.request.request_id)


@pytest.fixture
def d():
    return D()


def test_all_but_the_last_position_is_wanted_and_reserved_at_once(d):
    assert d.ask() == 99
    ids = d.allocate(99)
    assert d.desk.take() == [("reserve", KEY, 0, 99, [(0, 0, ids)], 0)]
    assert d.receiver.take_step() == ([(KEY, "r")], [])


def test_a_reservation_says_what_prompt_it_is_of_the_prefix_hit_included(d):
    tokens = list(range(100))
    d.ask(kit.Request(prompt_token_ids=tokens), computed=32)
    d.allocate(67, computed=32)
    assert d.desk.prompts == [digest(tokens, 99)]


def test_a_reservation_begins_where_the_prefix_hit_ends(d):
    assert d.ask(computed=32) == 67
    ids = d.allocate(67, computed=32)
    assert d.desk.take() == [("reserve", KEY, 32, 99, [(0, 32, ids[2:])], 0)]


def test_the_engine_goes_on_while_an_ended_requests_blocks_may_be_written(d):
    d.reserve()
    assert not d.receiver.fencing
    d.free()
    assert d.receiver.fencing
    d.receiver.on_ended(kit.failed(KEY, released=False))
    assert d.receiver.fencing
    d.receiver.on_released(kit.released(KEY))
    assert not d.receiver.fencing


def test_the_engine_does_not_go_on_for_ever_where_the_daemon_releases_nothing(d):
    d.reserve()
    d.free()
    d.now += 299
    assert d.receiver.fencing
    d.now += 2
    assert not d.receiver.fencing


def test_what_vllm_cut_from_the_answer_is_not_reserved(d):
    d.ask()
    ids = d.allocate(96)
    assert d.desk.take() == [("reserve", KEY, 0, 96, [(0, 0, ids)], 0)]


def test_a_full_prefix_hit_waits_for_nobody_and_lets_the_sender_go(d):
    assert d.ask(computed=96) == 0
    d.allocate(0, computed=100)
    assert d.desk.take() == [("decline", KEY, ["P"])]
    d.free()
    assert d.desk.take() == []
    assert len(d.receiver) == 0


def test_the_answer_has_no_effect_until_blocks_are_allocated(d):
    assert [d.ask(computed=96), d.receiver.wanted("r", 96), d.receiver.wanted("r", 0)] == [0, 0, 99]
    assert d.desk.take() == []


def test_prompt_logprobs_make_vllm_ignore_the_answer_and_the_sender_is_let_go(d):
    assert d.ask() == 99
    d.allocate(0, computed=100)
    assert d.desk.words() == ["decline"]


def test_landed_blocks_are_the_requests_alone(d):
    d.reserve()
    d.receiver.on_ended(kit.landed(KEY))
    assert len(d.blocks.references) == 0
    assert d.receiver.take_step()[1] == [(KEY, None)]
    d.free()
    assert d.blocks.all_free
    assert len(d.receiver) == 0


def test_after_a_load_vllm_allocates_again_and_nothing_is_reserved_again(d):
    d.reserve()
    d.receiver.on_ended(kit.landed(KEY))
    d.desk.take()
    d.allocate(0, computed=100)
    assert d.desk.take() == []


@pytest.mark.parametrize("end", [kit.landed(KEY), kit.failed(KEY, released=True)])
def test_a_request_that_is_asked_about_again_after_its_wait_is_computed_here(d, end):
    d.reserve()
    d.receiver.on_ended(end)
    assert d.receiver.wanted("r", 0) == 0


def test_a_failed_request_goes_on_while_its_blocks_wait_for_the_fence(d):
    ids = d.reserve()
    d.receiver.on_ended(kit.failed(KEY, released=False))
    d.blocks.free("r")  # vLLM gives the blocks of a failed load back before it recomputes
    again = d.blocks.grow("r", 100)
    assert not {block.block_id for block in again} & set(ids)
    d.receiver.on_released(kit.released(KEY))
    d.free()
    assert d.blocks.all_free
    assert len(d.receiver) == 0


def test_an_aborted_request_is_reported_once_and_its_blocks_wait_for_the_fence(d):
    d.reserve()
    d.receiver.take_step()
    d.desk.take()
    d.free()
    assert d.desk.take() == [("cancel", KEY, Side.RECEIVER)]
    [(key, fault)] = d.receiver.take_step()[1]
    assert key == KEY
    assert fault is not None
    assert not d.blocks.all_free
    d.receiver.on_ended(kit.failed(KEY, released=False))
    d.receiver.on_released(kit.released(KEY))
    assert d.blocks.all_free
    assert len(d.receiver) == 0


def test_a_request_aborted_before_it_had_blocks_lets_the_sender_go(d):
    d.ask()
    d.receiver.finished("r")
    assert d.desk.take() == [("decline", KEY, ["P"])]
    assert d.receiver.take_step() == ([], [])
    assert len(d.receiver) == 0


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_duplicate_that_is_aborted_before_it_had_blocks_harms_nobody(d, asked):
    first, second = kit.Request("first"), kit.Request("second")
    if asked == "before":
        d.ask(second)
    d.reserve(first)
    if asked == "after":
        d.ask(second)
    d.desk.take()
    d.receiver.finished("second")
    assert d.desk.take() == []


def test_of_two_that_ask_for_one_transfer_the_one_that_goes_leaves_it_to_the_other(d):
    first, second = kit.Request("first"), kit.Request("second")
    d.ask(first)
    d.ask(second)
    d.receiver.finished("second")
    assert d.desk.take() == []
    d.reserve(first)
    assert [said[0] for said in d.desk.take()] == ["reserve"]


def test_a_live_duplicate_is_computed_here_and_harms_nobody(d):
    d.reserve(kit.Request("first"))
    d.desk.take()
    assert d.ask(kit.Request("second")) == 0
    d.allocate(0, computed=100)
    d.free()
    assert d.desk.take() == []
    d.receiver.on_ended(kit.landed(KEY))
    assert (KEY, None) in d.receiver.take_step()[1]


def test_a_transfer_is_not_waited_for_a_second_time(d):
    d.reserve(kit.Request("first"))
    d.receiver.on_ended(kit.landed(KEY))
    d.free()
    assert d.ask(kit.Request("second")) == 0


def test_without_a_daemon_d_recomputes_or_fails_as_its_policy_says():
    recompute, fail = D(recompute=True), D(recompute=False)
    recompute.desk.ready = fail.desk.ready = False
    assert recompute.ask() == 0
    assert fail.ask() == 99


def test_a_draining_daemon_is_asked_for_nothing_new(d):
    d.receiver.draining = True
    assert d.ask() == 0


def test_a_second_end_changes_nothing(d):
    d.reserve()
    d.receiver.on_ended(kit.failed(KEY, released=True))
    d.receiver.take_step()
    d.receiver.on_ended(kit.landed(KEY))
    d.receiver.on_released(kit.released(KEY))
    assert d.receiver.take_step() == ([], [])


def test_null_blocks_of_a_window_are_neither_named_nor_held():
    d = D(groups=(kit.SIZE, kit.SIZE))
    d.ask()
    full = d.blocks.grow("full", 99)
    null = d.blocks.pool.null_block
    window = [null, null, null, null, null, *d.blocks.grow("window", 32)]
    before = null.ref_cnt
    d.receiver.allocated("r", (full, window), 99)
    [(_, _, _, _, named, _)] = d.desk.take()
    assert named[1] == (1, 80, [block.block_id for block in window[5:]])
    assert null.ref_cnt == before


def test_the_first_token_is_told_once(d):
    d.reserve()
    d.receiver.on_ended(kit.landed(KEY))
    d.receiver.take_step()
    d.desk.take()
    d.request.num_output_tokens = 1
    d.receiver.take_step()
    d.receiver.take_step()
    d.free()
    assert d.desk.take() == [("first_token", KEY)]


def test_a_request_of_one_token_has_a_first_token_too(d):
    d.reserve()
    d.receiver.on_ended(kit.landed(KEY))
    d.desk.take()
    d.request.num_output_tokens = 1
    d.free()
    assert d.desk.take() == [("first_token", KEY)]


def test_vllms_smaller_priority_goes_first(d):
    d.reserve(kit.Request(priority=-5))
    assert d.desk.take()[0][-1] == 5
