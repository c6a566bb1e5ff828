# SPDX-License-Identifier: Apache-2.0
"""What the operator says in `--kv-transfer-config`, and who the engine is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpush_client.items import Identity, Role
from kvpush_client.link import DAEMON_SILENCE

DEFAULT_RUNTIME_DIR = "/run/kvpushd"
_KEYS = ("runtime_dir", "start_timeout", "daemon_silence", "lease", "layer_groups")


class SettingsError(ValueError):
    """The engine can't be started like this; says which setting, what it was, what is expected."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`, checked.

    runtime_dir    where the daemon's sockets are; default $KVPUSHD_RUNTIME_DIR, else /run/kvpushd
    start_timeout  seconds that the engine's start waits for the daemon; default 30
    daemon_silence seconds without an answer after which the daemon counts as stopped; default 10
    lease          seconds that an unmatched half lives; None, the default = as the daemon is configured
    layer_groups   into how many parts a forward pass is cut: each is handed off as it is done; default 16
    """

    runtime_dir: Path
    start_timeout: float
    daemon_silence: float
    lease: float | None
    layer_groups: int

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
        """Raises SettingsError on an unknown key or an impossible value."""
        unknown = sorted(set(extra) - set(_KEYS))
        if unknown:
            known = ", ".join(_KEYS)
            raise SettingsError(f"kv_connector_extra_config has unknown keys {unknown}; known are {known}")
        runtime_dir = extra.get("runtime_dir", environ.get("KVPUSHD_RUNTIME_DIR") or DEFAULT_RUNTIME_DIR)
        if not isinstance(runtime_dir, str | os.PathLike):
            raise SettingsError(f"runtime_dir is {runtime_dir!r}, expected a folder's path")
        lease = extra.get("lease")
        return cls(
            runtime_dir=Path(runtime_dir),
            start_timeout=_number("start_timeout", extra.get("start_timeout", 30.0), 0.0, 3600.0),
            daemon_silence=_number(
                "daemon_silence", extra.get("daemon_silence", DAEMON_SILENCE), 1.0, 3600.0
            ),
            lease=None if lease is None else _number("lease", lease, 0.001, 86400.0),
            layer_groups=int(_number("layer_groups", extra.get("layer_groups", 16), 1, 1024)),
        )


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise SettingsError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}")
    return float(value)


def settings_of(vllm_config: Any) -> Settings:
    """The settings of an engine. Raises SettingsError."""
    return Settings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises SettingsError if the engine's configuration asks for what this connector can't do."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise SettingsError(
                f"{name} is {size}: KvpushConnector moves whole blocks of tokens, and context parallelism "
                "splits them over ranks; set it to 1"
            )
    local, world = parallel.local_world_size, parallel.world_size
    if local != world:
        raise SettingsError(
            f"{local} of the engine's {world} ranks are on this node (nnodes is {parallel.nnodes}): "
            "KvpushConnector names one node's daemon to the other side, so the other ranks' KV would be "
            "missing; start an engine whose ranks are all on one node"
        )


def identity_of(vllm_config: Any, role: Role, fingerprint: Mapping[str, str], software: str) -> Identity:
    """Who a process of the engine is, to the daemon.

    `instance_id` is made once per start of an engine and travels with its configuration into every process,
    spawned ones too. With the engine_id, which differs between data-parallel ranks, it names a launch.
    """
    parallel = vllm_config.parallel_config
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    named = f"{engine_id}\0{vllm_config.instance_id}"
    return Identity(
        engine_id=engine_id,
        launch=hashlib.blake2b(named.encode(), digest_size=16).hexdigest(),
        role=role,
        rank=parallel.rank if role is Role.WORKER else 0,
        world_size=parallel.world_size,
        local_ranks=parallel.local_world_size,
        fingerprint=fingerprint,
        software=software,
    )
