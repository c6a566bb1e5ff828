# SPDX-License-Identifier: Apache-2.0
"""KvpushConnector: vLLM's hooks, handed to the side that they belong to. No logic of its own.

    --kv-transfer-config '{"kv_connector": "KvpushConnector", "kv_role": "kv_producer"}'

`kv_role` is kv_producer on P, kv_consumer on D, kv_both on an engine that is both. Settings go into
`kv_connector_extra_config` (see settings.Settings).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpush_client.session import Session
from kvpush_client.vllm.cpu import allow_amx
from kvpush_client.vllm.metadata import Step, WorkerHello
from kvpush_client.vllm.scheduler import SchedulerSide
from kvpush_client.vllm.settings import refuse_unsupported, settings_of
from kvpush_client.vllm.start import NewSession, Starting, open_scheduler_side
from kvpush_client.vllm.worker import WorkerSide

logger = init_logger(__name__)


class KvpushConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands the KV cache of requests over between engines, through the kvpushd of each node.

    Constructing it raises SettingsError on settings that can't be followed.
    """

    _cache_hit_source = CacheHitSource.P2P
    _new_session: NewSession = Session

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings_of(vllm_config)
        refuse_unsupported(vllm_config)
        # Where the plugin was not loaded (kv_connector_module_path), this is the last chance to ask.
        allow_amx()
        self._block_pool: Any = None
        self._scheduler: SchedulerSide | None = None
        self._starting: Starting | None = None
        self._worker: WorkerSide
        if role is KVConnectorRole.WORKER:
            self._starting = Starting(
                vllm_config, kv_cache_config, self._settings, _software(), logger, self._new_session
            )

    # --- the worker's start --------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The context in which the KV cache is allocated out of a pool."""
        return self._worker_start.allocation()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describes the pool to the daemon and waits until it is registered."""
        self._worker = self._worker_start.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side needs of a worker: its fingerprint."""
        return WorkerHello(self._worker_start.fingerprint)

    @property
    def _worker_start(self) -> Starting:
        assert self._starting is not None, "a worker's hook was called on the scheduler's connector"
        return self._starting

    # --- the worker's steps --------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the daemon writes by itself."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only once all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of the step is done."""
        self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """The step's forward is done."""
        self._worker.forward_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Whose KV has arrived, or will not."""
        results = self._worker.results()
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    # --- the scheduler -------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The blocks that own references are taken of."""
        self._block_pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """The workers are up: the scheduler's session opens, under the same fingerprint as theirs."""
        fingerprints = [hello.fingerprint for _, hello in sorted(metadata.items())]
        self._scheduler = open_scheduler_side(
            self._vllm_config,
            self._kv_cache_config,
            self._settings,
            self._block_pool,
            fingerprints[0],
            _software(),
            logger,
            self._new_session,
        )

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM did not hand over the workers' handshake metadata"
        return self._scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preemption takes no block from a handoff, which has references of its own."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All that are transferred; vLLM must not zero what may already be arriving."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._side.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many of its tokens come from elsewhere."""
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """It has blocks."""
        self._side.allocated(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """A step has been scheduled."""
        return self._side.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; its blocks are vLLM's to free, since what we need has our own reference."""
        return False, self._side.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return False, self._side.finished(request)

    def has_pending_push_work(self) -> bool:
        """Blocks of a request that has ended are still read or written: vLLM makes steps until they are not,
        also before a pause or a sleep resets its cache."""
        return self._scheduler is not None and self._scheduler.moving

    def has_pending_block_frees(self) -> bool:
        """Blocks are about to come back, so that nobody needs to be preempted."""
        return self._scheduler is not None and self._scheduler.freeing

    # --- both ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The process is about to end."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._starting is not None:
            self._starting.close()


def _software() -> str:
    try:
        return f"kvpush_client {version('kvpushd')}, vllm {vllm.__version__}"
    except PackageNotFoundError:
        return f"kvpush_client (not installed), vllm {vllm.__version__}"
