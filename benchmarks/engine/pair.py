# SPDX-License-Identifier: Apache-2.0
"""Two engines, one on each end of the link, and what moves KV between them."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import probes, slowed
from benchmarks.engine.contenders import Contender, Setting
from testing import netns
from testing.clockwork.checkpoint import Geometry
from testing.clockwork.clock import Clock
from testing.clockwork.engine import Engine, Request
from testing.clockwork.harness import Harness
from testing.node import Node

START_S = 240.0
ANSWER_S = 240.0
_SIDE_CHANNEL_PORT = 5600


@dataclass(frozen=True, slots=True)
class Shape:
    """The engines' arguments, the same for all contenders, and kvpushd's."""

    model: Path
    geometry: Geometry
    block_size: int
    kv_cache_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    node: Mapping[str, Any]


class Pair:
    """P and D of one setting. `launch`, then `wait_ready`; use it inside `awake`."""

    def __init__(
        self, setting: Setting, shape: Shape, harness: Harness, link: netns.Link, folder: Path
    ) -> None:
        self.setting = setting
        self._shape = shape
        self._harness = harness
        self._link = link
        self._folder = folder
        self._engines: list[Engine] = []
        self._nodes: list[Node] = []
        self._pids: list[int] = []

    @property
    def p(self) -> Engine:
        """The prefill engine."""
        return self._engines[0]

    @property
    def d(self) -> Engine:
        """The decode engine; P itself where nothing is disaggregated."""
        return self._engines[-1]

    @property
    def engine_pids(self) -> Sequence[int]:
        """Its engines' processes."""
        return self._pids

    @property
    def node_pids(self) -> list[int]:
        """Its daemons' and movers' processes; none but kvpushd's."""
        return [pid for node in self._nodes for pid in (node.pid, node.mover_pid)]

    def launch(self) -> None:
        """Starts all processes and returns at once."""
        if self.setting.family == "kvpushd":
            for end, name in enumerate(("node-p", "node-d")):
                node = Node(
                    name,
                    self._folder,
                    namespace=self._link.names[end],
                    peer_host="0.0.0.0",
                    advertised_host=self._link.hosts[end],
                    **self._shape.node,
                )
                self._nodes.append(node.launch())
            for node in self._nodes:
                node.wait_ready()
        roles = [("p", "kv_producer"), ("d", "kv_consumer")]
        if self.setting.family == "none":
            roles = roles[:1]
        for end, (name, role) in enumerate(roles):
            self._engines.append(self._engine(end, name, role))

    def _engine(self, end: int, name: str, role: str) -> Engine:
        shape, family = self._shape, self.setting.family
        transfer: dict[str, Any] = {"kv_role": role, "engine_id": f"{family}-{name}"}
        if family == "kvpushd":
            transfer |= {
                "kv_connector": "KvpushConnector",
                "kv_connector_module_path": "kvpush_client.vllm.connector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"runtime_dir": str(self._nodes[end].runtime_dir)},
            }
        elif family in ("pull", "push"):
            connector = "NixlConnector" if family == "pull" else "NixlPushConnector"
            transfer |= {"kv_connector": connector, "kv_buffer_device": "cpu"}
        return self._harness.engine(
            f"{family}{'-slowed' if self.setting.slowed else ''}-{name}",
            model=shape.model,
            kv_transfer_config=None if family == "none" else transfer,
            env={
                "UCX_TLS": "tcp,self",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": self._link.hosts[end],
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_port_of(self.setting)),
            },
            kv_cache_bytes=shape.kv_cache_bytes,
            namespace=self._link.names[end],
            prepare=[f"{slowed.__name__}:nixl"] if self.setting.slowed else [],
            block_size=shape.block_size,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            max_num_seqs=256,
            enable_prefix_caching=True,
        )

    def wait_ready(self) -> None:
        """Until both are up; they are put to sleep then."""
        for engine in self._engines:
            engine.ready(START_S)
        for engine in self._engines:
            pids: list[int] = engine.inspect("testing.clockwork.probes:process_ids")
            self._pids += pids
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """While it is measured. Outside of it the engines of vLLM's connectors are stopped, as their progress
        threads would otherwise take a core each from whoever is measured."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self.setting.family in ("pull", "push"):
            for engine in self._engines:
                engine.kill(number)

    def configure(self, p: Clock | None = None, d: Clock | None = None, budget: int | None = None) -> None:
        """Pretended times of each, and how many tokens P computes in a step."""
        if p is not None:
            self.p.set_clock(p)
        if d is not None and self.d is not self.p:
            self.d.set_clock(d)
        if budget is not None:
            self.p.inspect(f"{probes.__name__}:set_budget", budget)

    def settle(self) -> None:
        """Until neither engine has anything left to do.

        Raises RuntimeError if a witness found a wrong byte.
        """
        for engine in self._engines:
            stats = engine.idle(ANSWER_S)
            if stats.mismatches:
                raise RuntimeError(f"{self.setting}: wrong bytes on {engine.name}: {stats.mismatches[0]}")

    def shuffle(self, seed: int) -> None:
        """Scatters both engines' free blocks."""
        for engine in self._engines:
            engine.inspect(f"{probes.__name__}:shuffle", seed)

    def begin(
        self, contender: Contender, prompt: Sequence[int], max_tokens: int, request_id: str
    ) -> tuple[Request, Request]:
        """Dispatches one request; returns P's leg and D's. Waits for P where legs follow each other."""
        if self.setting.family == "none":
            leg = self.p.submit(prompt, max_tokens, request_id=request_id)
            return leg, leg
        first: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.setting.family == "kvpushd":
            first["transfer_id"] = secrets.token_hex(16)
        else:
            first |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        p = self.p.submit(prompt, 1, first, request_id)
        if contender.concurrent:
            second = self._static(request_id, first)
        else:
            second = p.result(ANSWER_S).kv_transfer_params or {}
            if self.setting.family == "push":
                # With them vLLM would pull.
                second = {name: value for name, value in second.items() if name != "remote_block_ids"}
        return p, self.d.submit(prompt, max_tokens, second, request_id)

    def _static(self, request_id: str, first: Mapping[str, Any]) -> dict[str, Any]:
        second = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self.setting.family}-p",
            "remote_request_id": request_id,
            "remote_host": self._link.hosts[0],
            "remote_port": _port_of(self.setting),
            "tp_size": 1,
        }
        if self.setting.family == "kvpushd":
            second |= {"remote_port": self._nodes[0].port, "transfer_id": first["transfer_id"]}
        return second

    def log_tail(self) -> str:
        """What its processes said last."""
        logs = [engine.log_tail(15) for engine in self._engines]
        logs += [node.log.read_text()[-2000:] for node in self._nodes]
        return "\n".join(logs)

    def close(self) -> None:
        """Ends its processes."""
        for engine in self._engines:
            engine.close()
        for node in self._nodes:
            node.close()


def _port_of(setting: Setting) -> int:
    """Of vLLM's side channel: pairs share the namespaces."""
    offset = {"kvpushd": 0, "none": 0, "pull": 10, "push": 20}[setting.family]
    return _SIDE_CHANNEL_PORT + offset + 5 * setting.slowed
