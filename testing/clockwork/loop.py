# SPDX-License-Identifier: Apache-2.0
"""An engine's process: vLLM's EngineCore, stepped whenever vLLM's own busy loop would step it."""

import importlib
import os
import resource
import sys
import time
import traceback
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from kvpush_client.vllm.cpu import allow_amx
from testing.clockwork.messages import (
    Abort,
    Answer,
    Arm,
    Ask,
    AskStats,
    Command,
    Configure,
    EngineSpec,
    Exit,
    Inspect,
    Progress,
    Ready,
    Report,
    ResetPrefixCache,
    Stats,
    Submit,
)
from testing.clockwork.witness import Counts, Mismatch

# As EngineCoreProc waits after a step without a forward, so that transfer threads get the GIL.
_EMPTY_STEP_S = 0.001


def run(spec: EngineSpec, connection: Connection) -> None:
    """Be the engine until the other end says exit or goes away.

    Raises whatever vLLM raises, at start or in a step: such an engine is dead.
    """
    begin = time.monotonic()
    # It would overrule kv_cache_memory_bytes, and knows only whole GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ.update(spec.env)
    allow_amx()
    for function in spec.prepare:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)()
    config = EngineArgs(**spec.arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    # The CPU platform sets "spawn" while the config is made, which costs each rank the imports again.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    core = EngineCore(config, Executor.get_class(config), log_stats=True)
    loop = _Loop(core, connection, spec.clockwork)
    blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    connection.send(Ready(time.monotonic() - begin, blocks))
    try:
        loop.run()
    finally:
        core.shutdown()


class _Loop:
    def __init__(self, core: EngineCore, connection: Connection, clockwork: bool) -> None:
        self._core = core
        self._connection = connection
        self._clockwork = clockwork
        self._internal: dict[str, str] = {}
        self._external: dict[str, str] = {}
        self._when_idle: list[int] = []
        self._steps = 0
        self._preemptions = 0

    def run(self) -> None:
        while True:
            while self._connection.poll(0):
                try:
                    message = self._connection.recv()
                except EOFError:
                    return
                if isinstance(message, Exit):
                    return
                self._handle(message)
            if self._has_work():
                self._step()
                continue
            for number in self._when_idle:
                self._send(Answer(number, self._stats()))
            self._when_idle.clear()
            self._connection.poll(None)

    def _has_work(self) -> bool:
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        now = time.monotonic()
        self._steps += 1
        for of_client in outputs.values() if outputs else ():
            for output in of_client.outputs:
                self._report(output, now)
        if not executed and self._core.scheduler.has_requests():
            time.sleep(_EMPTY_STEP_S)

    def _report(self, output: EngineCoreOutput, now: float) -> None:
        self._preemptions += sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events or ())
        request_id = self._external.get(output.request_id)
        if request_id is None:  # aborted, and said so
            return
        finish = output.finish_reason
        if finish is not None:
            self._forget(request_id)
        cached = output.prefill_stats
        self._send(
            Progress(
                request_id=request_id,
                time=now,
                token_ids=tuple(output.new_token_ids),
                finish_reason=None if finish is None else str(finish),
                kv_transfer_params=output.kv_transfer_params,
                local_cached_tokens=None if cached is None else cached.num_local_cached_tokens,
                external_cached_tokens=None if cached is None else cached.num_external_cached_tokens,
            )
        )

    def _forget(self, request_id: str) -> None:
        del self._external[self._internal.pop(request_id)]

    def _send(self, report: Report) -> None:
        self._connection.send(report)

    def _handle(self, message: Command | Ask) -> None:
        match message:
            case Ask():
                self._answer(message)
            case Submit():
                self._submit(message)
            case Abort(request_id) if request_id in self._internal:
                self._core.abort_requests([self._internal[request_id]])
                self._forget(request_id)
                self._send(Progress(request_id, time.monotonic(), (), "abort", None, None, None))

    def _submit(self, command: Submit) -> None:
        # As vLLM's front end does: the id that the engine sees is unique, whatever the caller's is.
        internal = f"{command.request_id}-{uuid.uuid4().hex[:8]}"
        params = command.kv_transfer_params
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=command.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        request = EngineCoreRequest(
            request_id=internal,
            external_req_id=command.request_id,
            prompt_token_ids=list(command.prompt),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._internal[command.request_id] = internal
        self._external[internal] = command.request_id
        self._core.add_request(*self._core.preprocess_add_request(request))

    def _answer(self, ask: Ask) -> None:
        try:
            match ask.command:
                case AskStats(when_idle=True):
                    self._when_idle.append(ask.number)
                    return
                case AskStats():
                    value: Any = self._stats()
                case Configure(clock, verify):
                    value = self._core.collective_rpc("clockwork_set", args=(clock, verify))[0]
                case Arm(flip):
                    value = self._core.collective_rpc("clockwork_arm", args=(flip,))[0]
                case ResetPrefixCache():
                    value = self._core.reset_prefix_cache()
                case Inspect(function, arguments):
                    module, _, name = function.partition(":")
                    value = getattr(importlib.import_module(module), name)(self._core, *arguments)
                case other:
                    raise TypeError(f"{type(other).__name__} has no answer")
        except Exception as error:  # noqa: BLE001 - told to the caller, whose question it was
            traceback.print_exc()
            self._send(Answer(ask.number, error=f"{type(error).__name__}: {error}"))
        else:
            self._send(Answer(ask.number, value))

    def _stats(self) -> Stats:
        pool = self._core.scheduler.kv_cache_manager.block_pool
        running, waiting = self._core.scheduler.get_request_counts()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        reports = self._core.collective_rpc("clockwork_report") if self._clockwork else []
        return Stats(
            steps=self._steps,
            witness=_total([counts for counts, _ in reports]),
            mismatches=tuple(_in_order([found for _, found in reports])),
            free_blocks=pool.get_num_free_blocks(),
            blocks=pool.num_gpu_blocks,
            preemptions=self._preemptions,
            running=running,
            waiting=waiting,
            idle=not self._has_work(),
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            rss_bytes=resident,
        )


def _total(ranks: list[Counts]) -> Counts:
    return Counts(
        steps=max((counts.steps for counts in ranks), default=0),
        cells_written=sum(counts.cells_written for counts in ranks),
        cells_checked=sum(counts.cells_checked for counts in ranks),
        bad_cells=sum(counts.bad_cells for counts in ranks),
        flips=sum(counts.flips for counts in ranks),
    )


def _in_order(ranks: list[list[Mismatch]]) -> list[Mismatch]:
    return sorted((found for rank in ranks for found in rank), key=lambda found: (found.step, found.layer))


def fail(error: BaseException) -> None:
    """Write an engine's end into its log."""
    traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
