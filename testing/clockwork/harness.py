# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines for tests and benchmarks: one process imports vLLM, engines are forked from it.

    with Harness(folder) as harness, harness.engine("P", model=path) as p:
        p.ready(60)
        output = p.submit([5, 6, 7], max_tokens=4).result(30)

This process imports no vLLM.
"""

import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testing.clockwork.checkpoint import ARCHITECTURE
from testing.clockwork.engine import EXIT_S, Engine, EngineFailed, Output, Request
from testing.clockwork.messages import EngineSpec, Stats

__all__ = ["Engine", "EngineFailed", "Harness", "Output", "Request", "Stats"]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "NIXL_LOG_LEVEL": "WARN",
}


class Harness:
    """The process that engines are forked from. Importing vLLM there takes eight seconds, once.

    Logs go to `folder`: NNN-NAME.log and nursery.log. `env` is for all engines; see `engine` for one's own.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = Path(__file__).resolve().parents[2]
        # vLLM leaves sockets behind where temporary files go; their paths must be short.
        self._scratch = tempfile.TemporaryDirectory(prefix="clockwork-", ignore_cleanup_errors=True)
        environment = os.environ | _ENVIRONMENT | {"VLLM_CACHE_ROOT": str(folder / "vllm-cache")}
        environment["TMPDIR"] = self._scratch.name
        environment["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([str(root), str(root / "client"), *filter(None, sys.path)])
        )
        with theirs, (folder / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testing.clockwork.nursery", str(theirs.fileno())],
                env=environment | dict(env or {}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def engine(
        self,
        name: str,
        *,
        model: Path | str,
        kv_transfer_config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        kv_cache_bytes: int = 256 << 20,
        namespace: str | None = None,
        prepare: Sequence[str] = (),
        **arguments: Any,
    ) -> Engine:
        """Start an engine and return at once; `Engine.ready` waits for it.

        It lives in the network namespace `namespace`, if that is given, and calls the functions that
        `prepare` names ("module:function", without arguments) before vLLM starts in it.

        `arguments` are further fields of vLLM's EngineArgs. Defaults: eager, no tokenizer, no prefix caching,
        max_model_len 8192; vLLM's own for the rest (block_size 128, max_num_batched_tokens 2048).
        """
        config = json.loads((Path(model) / "config.json").read_text())
        clockwork = ARCHITECTURE in config["architectures"]
        settings: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": 8192,
            "kv_cache_memory_bytes": kv_cache_bytes,
        }
        if clockwork:
            settings |= {"load_format": "dummy", "worker_cls": "testing.clockwork.worker.ClockworkWorker"}
        if kv_transfer_config is not None:
            settings["kv_transfer_config"] = dict(kv_transfer_config)
        log = self._folder / f"{next(self._numbers):03}-{name}.log"
        spec = EngineSpec(
            name, str(log), clockwork, settings | arguments, dict(env or {}), namespace, tuple(prepare)
        )
        ours, theirs = Pipe()
        life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, their_life:
            socket.send_fds(self._control, [pickle.dumps(spec)], [theirs.fileno(), their_life.fileno()])
        return Engine(spec, ours, life)

    def close(self) -> None:
        """End the nursery, and with it every engine that still runs."""
        self._control.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
