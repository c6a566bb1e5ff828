# SPDX-License-Identifier: Apache-2.0
"""How the two sides come up: the session of each, and a worker's way from allocation to registration."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from logging import Logger
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform

from kvpush_client.errors import KvpushClientError
from kvpush_client.items import Role
from kvpush_client.pool import Pool
from kvpush_client.session import Session
from kvpush_client.vllm.fingerprint import fingerprint_of
from kvpush_client.vllm.layout import describe, keeps_token_rows
from kvpush_client.vllm.memory import AllocationError, PoolAllocation, allocation_bytes, refuse_device
from kvpush_client.vllm.references import BlockPool, References
from kvpush_client.vllm.scheduler import SchedulerSide
from kvpush_client.vllm.settings import Settings, identity_of
from kvpush_client.vllm.worker import WorkerSide

NewSession = Callable[..., Session]
"""Makes a session, not yet started, of what Session's constructor takes."""


class StartError(RuntimeError):
    """The engine can't start with this connector; says what to do."""


def connect(session: Session, settings: Settings) -> None:
    """Start a session and wait until it is up. Raises StartError."""
    session.start()
    try:
        session.wait_ready(settings.start_timeout)
    except KvpushClientError as error:
        session.close()
        raise StartError(
            f"this engine can't register with kvpushd at {settings.runtime_dir / 'kvpushd.sock'}: {error}. "
            "Is the daemon of this node running (systemctl status kvpushd)? Its folder is taken from "
            "kv_connector_extra_config.runtime_dir, else from $KVPUSHD_RUNTIME_DIR"
        ) from error


def open_scheduler_side(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: Settings,
    pool: BlockPool,
    fingerprint: Mapping[str, str],
    software: str,
    log: Logger,
    new_session: NewSession,
) -> SchedulerSide:
    """The scheduler side, connected. Raises StartError."""
    identity = identity_of(vllm_config, Role.SCHEDULER, fingerprint, software)
    session = new_session(settings.runtime_dir, identity, daemon_silence=settings.daemon_silence)
    connect(session, settings)
    return SchedulerSide(session, References(pool), vllm_config, kv_cache_config, settings, log)


class Starting:
    """A worker's start, in vLLM's order: `allocation`, `register`, then `fingerprint` is read."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        software: str,
        log: Logger,
        new_session: NewSession,
    ) -> None:
        """Raises AllocationError where the KV cache is to be on a device that is not supported."""
        refuse_device(current_platform.device_type)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._software = software
        self._log = log
        self._new_session = new_session
        self._allocation: PoolAllocation | None = None
        self._session: Session | None = None
        self.fingerprint: Mapping[str, str] = {}

    def allocation(self) -> PoolAllocation:
        """The context for the KV cache's allocation."""
        rank = self._vllm_config.parallel_config.rank
        self._allocation = PoolAllocation(allocation_bytes(self._kv_cache_config), f"kvpush-kv-{rank}")
        return self._allocation

    def register(self, kv_caches: Mapping[str, Any]) -> WorkerSide:
        """Show the pool to the daemon. Raises LayoutError, AllocationError or StartError."""
        pool = self._pool()
        # Before anyone registers it, so that its pages are this process's, and on its NUMA node.
        pool.prefault()
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)
        layout = describe(
            kv_caches,
            self._kv_cache_config,
            address=ctypes.addressof(ctypes.c_char.from_buffer(pool.view)),
            nbytes=pool.nbytes,
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=int(self._vllm_config.parallel_config.tensor_parallel_size),
            token_rows=lambda name: keeps_token_rows(layers[name].get_attn_backend()),
        )
        transferred = {layer.name: layers[layer.name] for layer in layout.layers}
        self.fingerprint = fingerprint_of(self._vllm_config, self._kv_cache_config, transferred)
        identity = identity_of(self._vllm_config, Role.WORKER, self.fingerprint, self._software)
        session = self._new_session(
            self._settings.runtime_dir,
            identity,
            pool,
            layout,
            daemon_silence=self._settings.daemon_silence,
        )
        connect(session, self._settings)
        self._session = session
        names = [layer.name for layer in layout.layers]
        return WorkerSide(session, names, self._settings.layer_groups, self._log)

    def _pool(self) -> Pool:
        if self._allocation is None or self._allocation.pool is None:
            raise AllocationError("vLLM registered its KV cache without having allocated it in our context")
        return self._allocation.pool

    def close(self) -> None:
        """End the session, and with it the daemon's use of the pool."""
        if self._session is not None:
            self._session.close()
        if self._allocation is not None and self._allocation.pool is not None:
            self._allocation.pool.close()
