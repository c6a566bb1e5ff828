# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of the demo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpushctl.demo.counters import Counters, parse
from kvpushctl.demo.environment import Vllm, python
from kvpushctl.demo.node import HOST
from kvpushctl.demo.ports import free_port
from kvpushctl.demo.processes import Child, Processes

if TYPE_CHECKING:
    from aiohttp import ClientSession

MODEL = "demo"
_START_SECONDS = 600.0
"""Far more than it takes, unless the host has other things to do. Ctrl-C is there for the impatient."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How every engine of the demo cuts its work."""

    block_size: int = 32
    blocks: int = 1024
    max_model_len: int = 4096
    chunk: int = 512
    """Tokens that a step computes at most: a longer prompt takes several."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is being served."""

    name: str
    url: str
    child: Child

    async def ready(self, session: ClientSession) -> None:
        """Returns once it answers. Raises CommandError if that never comes."""
        await self.child.until("readiness", lambda: _well(session, self.url), _START_SECONDS)

    async def counters(self, session: ClientSession) -> Counters:
        """What it counts now."""
        async with session.get(self.url + "/metrics") as response:
            response.raise_for_status()
            return parse(await response.text())


async def start(
    processes: Processes, name: str, role: str, model: Path, cut: Cut, vllm: Vllm, runtime_dir: Path
) -> Engine:
    """Starts an engine whose connector talks to the daemon in `runtime_dir`; the caller awaits readiness."""
    port = free_port()
    transfer = {
        "kv_connector": "KvpushConnector",
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "runtime_dir": str(runtime_dir),
            "start_timeout": 120,
            "daemon_silence": 60,  # a busy host must not look like a stopped daemon
        },
    }
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in _sizes(cut, vllm).items()]
    argv = python(
        *("-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", MODEL, "--host", HOST, "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(transfer)),
        *flags,
    )
    return Engine(name, f"http://{HOST}:{port}", await processes.start(name, argv))


def arguments(model: Path, cut: Cut, vllm: Vllm) -> dict[str, Any]:
    """The same engine without a connector, as arguments of vllm.LLM."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        **_sizes(cut, vllm),
    }


def _sizes(cut: Cut, vllm: Vllm) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "block_size": cut.block_size,
        "num_gpu_blocks_override": cut.blocks,
        "max_model_len": cut.max_model_len,
        "max_num_batched_tokens": cut.chunk,
    }
    if not vllm.cpu:
        # Three small engines share one GPU.
        sizes["gpu_memory_utilization"] = 0.1
    return sizes


async def _well(session: ClientSession, url: str) -> bool | None:
    from aiohttp import ClientError

    try:
        async with session.get(url + "/health") as response:
            return True if response.status == 200 else None
    except ClientError:
        return None


async def router(processes: Processes, session: ClientSession, prefill: str, decode: str) -> str:
    """Starts a kvpush-router in front of the two and awaits it; its URL. `prefill` as its flag takes it."""
    port = free_port()
    argv = python("-m", "kvpush_router", "--prefill", prefill, "--decode", decode, "--port", str(port))
    child = await processes.start("router", argv)
    url = f"http://{HOST}:{port}"
    await child.until("readiness", lambda: _well(session, url), 60.0)
    return url
