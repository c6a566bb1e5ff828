# SPDX-License-Identifier: Apache-2.0
"""What the connector costs an engine's step: microseconds in its hooks, without the daemon.

    python -m benchmarks.step

`idle`: no request is transferred. `P` and `D`: so many requests of 4,096 tokens are, one chunk each per step.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvpush_client.events import Connected, ReservationEnded, TransferKey
from kvpush_client.vllm.metadata import Step
from kvpush_client.vllm.references import References
from kvpush_client.vllm.scheduler import SchedulerSide
from kvpush_client.vllm.settings import Settings
from kvpush_client.vllm.worker import WorkerSide

_SIZE = 16
_PROMPT = 4096
_LAYERS = [f"model.layers.{i}.attn" for i in range(24)]
_LOG = logging.getLogger("step")


class Desk:
    """A session that takes everything at once: what is left is the connector's own cost."""

    ready = True

    def __init__(self) -> None:
        self.events: list[Any] = []

    def poll(self) -> list[Any]:
        """What a benchmark put there."""
        events, self.events = self.events, []
        return events

    def reserve(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    handoff = advance = cancel = decline = first_token = reserve

    def close(self) -> None:
        """Nothing."""


class Engine:
    """Both sides of the connector, and requests as vLLM would schedule them."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.desk.events = [Connected(bytes(16), "node", 1)]
        self.pool = BlockPool(1 << 16, enable_caching=False, hash_block_size=_SIZE)
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                engine_id="E", is_kv_producer=True, is_kv_consumer=True, kv_load_failure_policy="recompute"
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            max_concurrent_batches=1,
        )
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=_SIZE))
        cache = SimpleNamespace(transfer_group_ids=(0,), transfer_groups=(group,))
        settings = Settings.parse({}, {})
        session: Any = self.desk
        self.side = SchedulerSide(session, References(self.pool), config, cache, settings, _LOG)
        self.worker = WorkerSide(self.desk, _LAYERS, settings.layer_groups, _LOG)
        self.tables: dict[str, list[Any]] = {}

    def request(self, number: int, params: Any) -> Any:
        """A request of 4,096 tokens with all of its blocks."""
        request_id = f"r{number}"
        self.tables[request_id] = self.pool.get_new_blocks(_PROMPT // _SIZE)
        return SimpleNamespace(
            request_id=request_id,
            num_prompt_tokens=_PROMPT,
            num_computed_tokens=0,
            num_output_tokens=0,
            priority=0,
            kv_transfer_params=params,
            lora_request=None,
            resumable=False,
        )

    def output(self, tokens: dict[str, int]) -> Any:
        """A step's scheduler output."""
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            preempted_req_ids=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            kv_connector_block_state=SimpleNamespace(
                resolve_block_ids=lambda r: ([b.block_id for b in self.tables[r]],)
            ),
        )

    def step(self, tokens: dict[str, int]) -> tuple[float, float]:
        """Microseconds of a step: on the scheduler's thread, and on the worker's."""
        output = self.output(tokens)
        begin = time.perf_counter()
        step: Step = self.side.step(output)
        scheduled = time.perf_counter()
        self.worker.begin(step)
        for layer in _LAYERS:
            self.worker.layer_done(layer)
        self.worker.forward_done()
        self.worker.results()
        end = time.perf_counter()
        return (scheduled - begin) * 1e6, (end - scheduled) * 1e6


def idle(engine: Engine, _: int) -> Sequence[tuple[float, float]]:
    """64 requests decode, none is transferred."""
    return [engine.step(dict.fromkeys((f"other{i}" for i in range(64)), 1)) for _ in range(2000)]


def sending(engine: Engine, count: int) -> Sequence[tuple[float, float]]:
    """`count` prompts are prefilled at once, in chunks of 128 tokens."""
    requests = []
    for number in range(count):
        request = engine.request(
            number, {"do_remote_decode": True, "transfer_id": number.to_bytes(16, "big").hex()}
        )
        engine.side.add(request)
        requests.append(request)
    times = []
    for _ in range(_PROMPT // 128):
        times.append(engine.step({r.request_id: 128 for r in requests}))
        for request in requests:
            request.num_computed_tokens += 128
    return times


def receiving(engine: Engine, count: int) -> Sequence[tuple[float, float]]:
    """`count` reservations are made, and land, in each step."""
    times = []
    for round_number in range(50):
        keys = []
        for number in range(round_number * count, (round_number + 1) * count):
            transfer_id = (number + 1).to_bytes(16, "big")
            request = engine.request(
                number,
                {
                    "do_remote_prefill": True,
                    "transfer_id": transfer_id.hex(),
                    "remote_engine_id": "P",
                    "remote_host": "h",
                    "remote_port": 1,
                },
            )
            engine.side.add(request)
            external, _ = engine.side.matched(request, 0)
            table = engine.tables.pop(request.request_id)
            engine.side.allocated(request, (table,), external)
            keys.append((TransferKey(transfer_id), request, table))
        times.append(engine.step({}))
        engine.desk.events = [ReservationEnded(key, None, released=True) for key, _, _ in keys]
        times.append(engine.step({}))
        for _, request, table in keys:
            engine.side.finished(request)
            engine.pool.free_blocks(table)
    return times


def main() -> None:
    """Print a table."""
    cases: list[tuple[str, Callable[[Engine, int], Sequence[tuple[float, float]]], int]] = [
        ("idle", idle, 0),
        ("P", sending, 1),
        ("P", sending, 16),
        ("D", receiving, 1),
        ("D", receiving, 16),
    ]
    print(f"{'case':<6}{'requests':>9}{'scheduler median, p99 us':>28}{'worker median, p99 us':>28}")
    for name, case, count in cases:
        scheduler, worker = (sorted(side) for side in zip(*case(Engine(), count), strict=True))
        row = [
            f"{statistics.median(side):.1f}, {side[int(len(side) * 0.99) - 1]:.1f}"
            for side in (scheduler, worker)
        ]
        print(f"{name:<6}{count:>9}{row[0]:>28}{row[1]:>28}")


if __name__ == "__main__":
    main()
