# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the connector: one session, the requests of both legs, what each step tells workers.

Everything here runs on the scheduler's thread; what the daemon says is taken from the session's queue
whenever vLLM calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from logging import Logger
from typing import Any

from kvpush_client.events import (
    Connected,
    Disconnected,
    Draining,
    HandoffEnded,
    Matched,
    ReservationEnded,
    ReservationReleased,
)
from kvpush_client.session import Session
from kvpush_client.vllm import params
from kvpush_client.vllm.layout import window
from kvpush_client.vllm.lull import Lull
from kvpush_client.vllm.metadata import Step
from kvpush_client.vllm.receiver import Receiver
from kvpush_client.vllm.references import References
from kvpush_client.vllm.sender import Scheduled, Sender
from kvpush_client.vllm.settings import Settings
from kvpush_client.vllm.writers import Writers, Writing


class SchedulerSide:
    """vLLM's scheduler hooks. None of them raises because of what a request or the daemon says."""

    def __init__(
        self,
        session: Session,
        references: References,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        log: Logger,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._session = session
        self._log = log
        self._engine_id = str(transfer.engine_id)
        self._tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
        self._may_send = bool(transfer.is_kv_producer)
        self._may_receive = bool(transfer.is_kv_consumer)
        # With batches in flight, what a former step writes may be unwritten when the next is scheduled.
        self._synchronous = vllm_config.max_concurrent_batches == 1
        self._group_ids = tuple(kv_cache_config.transfer_group_ids)
        self._group_sizes = tuple(int(g.kv_cache_spec.block_size) for g in kv_cache_config.transfer_groups)
        self._lull = Lull(
            session,
            batches=int(vllm_config.max_concurrent_batches),
            lockstep=int(vllm_config.parallel_config.data_parallel_size) > 1,
        )
        self._address: tuple[str, int] | None = None
        self.receiver = Receiver(
            session,
            references,
            group_ids=self._group_ids,
            group_sizes=self._group_sizes,
            lease=settings.lease,
            recompute=transfer.kv_load_failure_policy == "recompute",
            log=log,
        )
        self.sender = Sender(
            session,
            references,
            group_ids=self._group_ids,
            group_sizes=self._group_sizes,
            group_windows=tuple(window(g.kv_cache_spec) for g in kv_cache_config.transfer_groups),
            lease=settings.lease,
            log=log,
        )

    def add(self, request: Any) -> None:
        """`on_new_request`."""
        self.poll()
        try:
            leg = self._leg(request)
        except params.Malformed as error:
            self._log.warning("request %s: computed here alone: %s", request.request_id, error)
            return
        if isinstance(leg, params.Receive):
            self.receiver.add(request, leg)
        elif isinstance(leg, params.Send):
            self.sender.add(request, leg)

    def _leg(self, request: Any) -> params.Receive | params.Send | None:
        leg = params.parse(request.kv_transfer_params, request.request_id, self._engine_id)
        if leg is None:
            return None
        if request.lora_request is not None:
            raise params.Malformed("its KV depends on an adapter, and engines do not compare adapters")
        if request.resumable:
            raise params.Malformed("its prompt grows while it runs (streaming input)")
        if isinstance(leg, params.Receive) and not self._may_receive:
            # vLLM defers frees of blocks that a step in flight still writes only where kv_role may receive.
            raise params.Malformed("do_remote_prefill needs kv_role kv_consumer or kv_both here")
        if isinstance(leg, params.Send) and not self._may_send:
            raise params.Malformed("do_remote_decode needs kv_role kv_producer or kv_both here")
        return leg

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """`get_num_new_matched_tokens`."""
        self.poll()
        external = self.receiver.wanted(request.request_id, computed)
        return external, external > 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[Any]], external: int) -> None:
        """`update_state_after_alloc`, with the blocks per group of vLLM's."""
        self.receiver.allocated(request.request_id, blocks, external)

    def step(self, output: Any) -> Step:
        """`build_connector_meta`."""
        self.poll()
        state = output.kv_connector_block_state
        step = Step()
        if state is not None:
            writers = Writers(
                lambda: _writings(output),
                state.resolve_block_ids,
                self._group_ids,
                self._group_sizes,
                self._synchronous,
            )
            step.progress = self.sender.step(
                Scheduled(
                    output.num_scheduled_tokens,
                    output.preempted_req_ids or frozenset(),
                    state.resolve_block_ids,
                    writers,
                )
            )
        step.waits, step.ends = self.receiver.take_step()
        if self._lull.step(len(output.num_scheduled_tokens), bool(step.waits or step.ends)):
            self.poll()
            step.waits, step.ends = self.receiver.take_step()
        return step

    def finished(self, request: Any) -> dict[str, Any] | None:
        """`request_finished_all_groups`: what the router is to give to D, if anything."""
        self.poll()
        self.receiver.finished(request.request_id)
        send = self.sender.finished(request.request_id)
        if send is None or self._address is None:
            return None
        host, port = self._address
        return params.answer(send, request.request_id, self._engine_id, host, port, self._tp_size)

    @property
    def moving(self) -> bool:
        """`has_pending_push_work`."""
        self.poll()
        return self.sender.moving or self.receiver.fencing

    @property
    def freeing(self) -> bool:
        """`has_pending_block_frees`."""
        self.poll()
        return self.sender.freeing

    def poll(self) -> None:
        """Act on what the daemon has said."""
        for event in self._session.poll():
            match event:
                case Connected(peer_host=host, peer_port=port):
                    self._address = (host, port)
                    self.receiver.draining = self.sender.draining = False
                case Disconnected(detail):
                    self._log.warning("the daemon is away: %s", detail)
                case Draining():
                    self.receiver.draining = self.sender.draining = True
                case Matched():
                    self.sender.on_matched(event)
                case HandoffEnded():
                    self.sender.on_ended(event)
                case ReservationEnded():
                    self.receiver.on_ended(event)
                case ReservationReleased():
                    self.receiver.on_released(event)

    def close(self) -> None:
        """The engine ends."""
        self._session.close()


def _writings(output: Any) -> Iterator[Writing]:
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        computed = new.num_computed_tokens
        yield Writing(new.req_id, computed, computed + tokens[new.req_id])
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield Writing(request_id, computed, computed + tokens[request_id])
