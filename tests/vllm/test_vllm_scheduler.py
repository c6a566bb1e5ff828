# SPDX-License-Identifier: Apache-2.0
"""The scheduler side as vLLM calls it."""

from types import SimpleNamespace

import pytest
import vllm_kit as kit

from kvpush_client.events import Connected, Disconnected, Draining, TransferKey
from kvpush_client.vllm.lull import Lull
from kvpush_client.vllm.metadata import Progress
from kvpush_client.vllm.scheduler import SchedulerSide
from kvpush_client.vllm.settings import Settings

KEY = TransferKey(kit.transfer())
SEND = {"do_remote_decode": True, "transfer_id": kit.transfer().hex()}
RECEIVE = {
    "do_remote_prefill": True,
    "transfer_id": kit.transfer().hex(),
    "remote_engine_id": "P",
    "remote_host": "node-p",
    "remote_port": 4711,
}


class Engine:
    """The scheduler side of an engine, connected."""

    def __init__(self, role="kv_both"):
        self.desk = kit.Desk(events=[Connected(b"i" * 16, "node-e", 4712)])
        self.blocks = kit.Blocks()
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                engine_id="E",
                is_kv_producer=role in ("kv_both", "kv_producer"),
                is_kv_consumer=role in ("kv_both", "kv_consumer"),
                kv_load_failure_policy="recompute",
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_size=1),
            max_concurrent_batches=1,
        )
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=kit.SIZE))
        cache = SimpleNamespace(transfer_group_ids=(0,), transfer_groups=(group,))
        settings = Settings.parse({}, {})
        self.side = SchedulerSide(self.desk, self.blocks.references, config, cache, settings, kit.LOG)

    def schedule(self, new=(), cached=(), **tokens):
        """A step's output; `new` and `cached` are requests that are scheduled in it."""
        for request in (*new, *cached):
            self.blocks.grow(request.request_id, request.num_computed_tokens + tokens[request.request_id])
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            preempted_req_ids=set(),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.num_computed_tokens) for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                num_computed_tokens=[r.num_computed_tokens for r in cached],
            ),
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=self.blocks.ids),
        )


@pytest.fixture
def engine():
    return Engine()


def test_p_answers_with_its_daemons_address(engine):
    request = kit.Request(kv_transfer_params=SEND)
    engine.side.add(request)
    step = engine.side.step(engine.schedule(new=[request], r=100))
    assert step.progress == [Progress(KEY, 0, 100)]
    assert engine.side.finished(request) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "E",
        "remote_host": "node-e",
        "remote_port": 4712,
        "remote_request_id": "r",
        "tp_size": 2,
        "transfer_id": kit.transfer().hex(),
    }


def test_a_hit_on_a_block_that_another_new_request_writes_in_this_step_is_not_final_before_it(engine):
    writer, reader = kit.Request("writer"), kit.Request("r", 100, 64, kv_transfer_params=SEND)
    engine.side.add(writer)
    engine.side.add(reader)
    engine.blocks.grow("writer", 100)
    engine.blocks.tables["r"] = engine.blocks.tables["writer"][:4]
    step = engine.side.step(engine.schedule(new=[writer, reader], writer=100, r=36))
    assert step.progress == [Progress(KEY, 0, 100)]


def test_a_hit_on_what_a_former_step_wrote_is_final_before_the_step(engine):
    writer, reader = kit.Request("writer", 100, 64), kit.Request("r", 100, 64, kv_transfer_params=SEND)
    engine.side.add(reader)
    engine.blocks.grow("writer", 64)
    engine.blocks.tables["r"] = engine.blocks.tables["writer"][:4]
    step = engine.side.step(engine.schedule(new=[reader], cached=[writer], writer=36, r=36))
    assert step.progress == [Progress(KEY, 64, 100)]


def test_ds_wait_goes_to_the_workers_with_the_step_that_reserves(engine):
    request = kit.Request(kv_transfer_params=RECEIVE)
    engine.side.add(request)
    assert engine.side.matched(request, 0) == (99, True)
    engine.side.allocated(request, (engine.blocks.grow("r", 99),), 99)
    assert engine.side.step(engine.schedule()).waits == [(KEY, "r")]


def test_an_end_heard_between_steps_goes_to_the_workers(engine):
    request = kit.Request(kv_transfer_params=RECEIVE)
    engine.side.add(request)
    engine.side.matched(request, 0)
    engine.side.allocated(request, (engine.blocks.grow("r", 99),), 99)
    engine.desk.events.append(kit.landed(KEY))
    step = engine.side.step(engine.schedule())
    assert (step.waits, step.ends) == ([(KEY, "r")], [(KEY, None)])


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("kv_both", {"kv_transfer_params": RECEIVE | {"remote_port": "x"}}),
        ("kv_both", {"kv_transfer_params": "nonsense"}),
        ("kv_both", {"kv_transfer_params": RECEIVE, "resumable": True}),
        ("kv_both", {"kv_transfer_params": RECEIVE, "lora_request": object()}),
        ("kv_both", {"kv_transfer_params": SEND, "lora_request": object()}),
        ("kv_producer", {"kv_transfer_params": RECEIVE}),
        ("kv_consumer", {"kv_transfer_params": SEND}),
    ],
)
def test_what_cant_be_followed_is_computed_here_alone(role, changes):
    engine = Engine(role)
    request = kit.Request(**changes)
    engine.side.add(request)
    assert engine.side.matched(request, 0) == (0, False)
    engine.side.allocated(request, (engine.blocks.grow("r", 100),), 0)
    engine.side.step(engine.schedule(new=[request], r=100))
    assert engine.side.finished(request) is None
    assert engine.desk.take() == []


def test_an_ordinary_request_costs_the_daemon_nothing(engine):
    request = kit.Request()
    engine.side.add(request)
    assert engine.side.matched(request, 0) == (0, False)
    engine.side.step(engine.schedule(new=[request], r=100))
    assert engine.side.finished(request) is None
    assert engine.desk.take() == []


def test_after_a_drain_a_new_daemon_is_asked_again(engine):
    request = kit.Request(kv_transfer_params=RECEIVE)
    engine.side.add(request)
    engine.desk.events.append(Draining())
    assert engine.side.matched(request, 0) == (0, False)
    engine.desk.events += [Disconnected("restarted"), Connected(b"j" * 16, "node-e", 4712)]
    assert engine.side.matched(request, 0) == (99, True)


def test_idle_work_is_seen_and_ends(engine):
    request = kit.Request(kv_transfer_params=SEND)
    engine.side.add(request)
    engine.side.step(engine.schedule(new=[request], r=100))
    engine.desk.events.append(kit.came(KEY))
    engine.side.finished(request)
    engine.blocks.free("r")
    assert engine.side.moving
    engine.desk.events.append(kit.delivered(KEY))
    assert not engine.side.moving
    assert engine.blocks.all_free


# --- steps with nothing to compute ------------------------------------------------------------------------


def test_a_step_with_nothing_to_compute_waits_for_the_daemons_word_and_acts_on_it(engine):
    request = kit.Request(kv_transfer_params=RECEIVE)
    engine.side.add(request)
    engine.side.matched(request, 0)
    engine.side.allocated(request, (engine.blocks.grow("r", 99),), 99)
    engine.side.step(engine.schedule())
    engine.desk.comes.append(kit.landed(KEY))
    assert engine.side.step(engine.schedule()).ends == [(KEY, None)]


def test_a_step_that_has_news_for_the_workers_does_not_wait(engine):
    request = kit.Request(kv_transfer_params=RECEIVE)
    engine.side.add(request)
    engine.side.matched(request, 0)
    engine.side.allocated(request, (engine.blocks.grow("r", 99),), 99)
    engine.desk.comes.append(kit.landed(KEY))
    assert engine.side.step(engine.schedule()).ends == []


def test_a_step_that_computes_does_not_wait(engine):
    request = kit.Request()
    engine.side.add(request)
    engine.side.step(engine.schedule(new=[request], r=100))
    assert engine.desk.waits == 0


@pytest.mark.parametrize(("batches", "empty_steps"), [(1, 1), (2, 2), (4, 4)])
def test_no_step_waits_while_batches_may_be_in_flight(batches, empty_steps):
    desk = kit.Desk()
    lull = Lull(desk, batches=batches, lockstep=False)
    for _ in range(3):
        assert not lull.step(1, news=False)
        waited = [lull.step(0, news=False) for _ in range(empty_steps)]
        assert waited == [False] * (empty_steps - 1) + [True]


def test_no_step_waits_where_other_ranks_would_wait_with_it():
    desk = kit.Desk()
    assert not Lull(desk, batches=1, lockstep=True).step(0, news=False)
    assert desk.waits == 0
