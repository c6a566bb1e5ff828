# SPDX-License-Identifier: Apache-2.0
"""The processes of a chaos run: two nodes with a cable between them, a third beside P, engines, a router."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvpush_client._proto import admin_pb2
from kvpushctl.demo.ports import free_port
from testing import engines, netns
from testing.chaos.ears import Ears
from testing.chaos.http_front import HttpFront
from testing.chaos.scenario import GIVEN_UP, Whom
from testing.clockwork import checkpoint
from testing.clockwork.clock import Clock
from testing.clockwork.harness import Engine, EngineFailed, Harness, Request
from testing.engines import DECODE, PREFILL, START, coordinates, prompt
from testing.ensemble import Ensemble
from testing.faults.board import Board
from testing.node import Node

LEASE = 5.0
SILENCE = 3.0
"""Seconds after which a link, or a mover, that says nothing counts as dead."""
DRAIN = 2.0
"""Seconds that a daemon which is told to end gives its transfers."""
P, D, RANKS = "P", "D", "R"
CONNECTOR = "testing.chaos.connector:ListeningConnector"
BESIDE_RATE = 30_000_000
"""Bytes a second between P's node and the third one."""
CALM: dict[str, Any] = {
    "lease": LEASE,
    "link_silence": SILENCE,
    "engine_silence": GIVEN_UP,
    "mover_silence": SILENCE,
    "connect_timeout": 2,
    "fence_patience": 1,
    "drain_timeout": DRAIN,
}


@dataclass(slots=True)
class Legs:
    """One prompt as it was sent: the requests that engines have of it, and what a router's client got."""

    tokens: list[int]
    transfer_id: bytes
    sender: str = P
    count: int = 4
    p: Request | None = None
    d: Request | None = None
    sent: dict[str, float] = field(default_factory=dict)
    """By engine: when it got its leg, CLOCK_MONOTONIC."""


class Stage(Ensemble):
    """Starts everything, keeps it up, and starts again what was killed. Needs root."""

    def __init__(self, folder: Path, harness: Harness | None = None) -> None:
        """`folder` gets logs and sockets: a short path. Engines are forked of `harness`, if there is one."""
        super().__init__()
        self.folder = folder
        self.board = Board(folder / "board")
        self.ears = Ears(self.board.folder)
        self._model = checkpoint.write(folder / "model", checkpoint.Geometry())
        self._given = harness
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}
        self.logs: list[Path] = []
        self.router: subprocess.Popen[bytes] | None = None
        self.front: HttpFront | None = None
        self.router_port = 0

    def _begin(self) -> None:
        self.link = self._stack.enter_context(netns.Link(f"kvc{os.getpid()}"))
        self._harness = self._given or self._stack.enter_context(Harness(self.folder / "engines"))
        for name, end in (("p", 0), ("d", 1), ("e", 0)):
            self.nodes[name] = self._node(name, end).launch()
        for node in self.nodes.values():
            node.wait_ready()
        # Between P's node and the third one lies the loopback of P's namespace.
        shaped = ("rate", f"{BESIDE_RATE * 8}bit", "burst", "131072", "limit", "2000000")
        subprocess.run(
            ["tc", "-n", self.link.names[0], "qdisc", "replace", "dev", "lo", "root", "tbf", *shaped],
            check=True,
        )
        self._stack.callback(self._close_engines)
        self._stack.callback(self.stop_router)
        for name in (P, D):
            self._launch(name)
        for name in (P, D):
            self.engines[name].ready(START)

    def _node(self, name: str, end: int) -> Node:
        node = Node(
            name,
            self.folder,
            namespace=self.link.names[end],
            peer_host="0.0.0.0",
            board=self.board,
            advertised_host=self.link.hosts[end],
            **CALM,
        )
        self._stack.callback(node.close)
        return node

    def _close_engines(self) -> None:
        for engine in self.engines.values():
            engine.close()

    # --- engines -----------------------------------------------------------------------------------------

    def _launch(self, name: str) -> None:
        role = "kv_consumer" if name == D else "kv_producer"
        node = self.nodes["d" if name == D else "p"]
        self.engines[name] = engine = engines.launch(
            self._harness,
            name,
            role,
            node,
            self._model,
            extra={"lease": LEASE},
            connector=CONNECTOR,
            env=self.board.environment("d" if name == D else "p"),
            tensor_parallel_size=2 if name == RANKS else 1,
        )
        self.logs.append(engine.log)

    def alive(self, name: str) -> bool:
        """Whether an engine runs."""
        engine = self.engines.get(name)
        if engine is None:
            return False
        try:
            engine.ended(0)
        except TimeoutError:
            return True
        return False

    def bury(self, name: str) -> None:
        """Sees to it that an engine that was hit is gone, ranks and all."""
        engine = self.engines.pop(name)
        with contextlib.suppress(EngineFailed):
            engine.kill()
        engine.close()

    def begin(self, name: str) -> None:
        """Starts an engine that is not there; `ready` waits for it."""
        if name not in self.engines:
            self._launch(name)

    def ready(self, name: str) -> Engine:
        """An engine, once it is up."""
        engine = self.engines[name]
        engine.ready(START)
        return engine

    def configure(self, p: Clock | None = None, d: Clock | None = None, sender: str = P) -> None:
        """Pretended times of engines, where given."""
        for name, clock in ((sender, p), (D, d)):
            if clock is not None:
                self.engines[name].set_clock(clock)

    def rank_pids(self, name: str) -> list[int]:
        """The process ids of an engine's ranks."""
        pids: list[int] = self.engines[name].inspect("testing.clockwork.probes:process_ids")
        return pids[1:]

    # --- requests ----------------------------------------------------------------------------------------

    def send_p(self, legs: Legs) -> None:
        """P's leg."""
        params = {**PREFILL, "transfer_id": legs.transfer_id.hex()}
        legs.sent[legs.sender] = time.monotonic()
        legs.p = self.engines[legs.sender].submit(legs.tokens, 1, params)

    def send_d(self, legs: Legs) -> None:
        """D's leg, with P's static coordinates."""
        params = {
            **DECODE,
            **coordinates(legs.sender, self.link.hosts[0], self.nodes["p"].port),
            "transfer_id": legs.transfer_id.hex(),
        }
        legs.sent[D] = time.monotonic()
        legs.d = self.engines[D].submit(legs.tokens, legs.count, params)

    def new_legs(self, length: int, *seed: object, sender: str = P) -> Legs:
        """A prompt that nobody has sent yet."""
        return Legs(prompt(length, *seed), secrets.token_bytes(16), sender)

    # --- nodes -------------------------------------------------------------------------------------------

    def look(self, name: str, transfer_id: bytes) -> admin_pb2.Transfer | None:
        """A node's account of a transfer; None where it knows none or does not answer."""
        try:
            found = self.nodes[name].transfers(transfer_id)
        except (grpc.RpcError, AssertionError):
            return None
        return found[0] if found else None

    def status(self, name: str) -> admin_pb2.GetStatusResponse | None:
        """One look at a node; None where it does not answer."""
        try:
            return self.nodes[name].status()
        except grpc.RpcError:
            return None

    def pid(self, whom: Whom) -> int:
        """The process to hit, but for engines, which are hit by their handle."""
        match whom:
            case Whom.P_DAEMON | Whom.D_DAEMON:
                return self.nodes[whom.node].pid
            case Whom.P_MOVER | Whom.D_MOVER:
                return self.nodes[whom.node].mover_pid
            case Whom.FIRST_RANK | Whom.LAST_RANK:
                return self.rank_pids(RANKS)[0 if whom is Whom.FIRST_RANK else -1]
            case Whom.ROUTER:
                assert self.router is not None
                return self.router.pid
            case _:
                raise ValueError(f"{whom} is no process of its own")

    # --- the router --------------------------------------------------------------------------------------

    def start_router(self) -> None:
        """The router, in front of P and D, with P's coordinates; returns once it answers."""
        if self.front is None:
            self.front = HttpFront(lambda name: self.engines[name], (P, D))
        if self.router is not None:
            if self._router_listens():
                return
            # Told to end, it answers what it has and takes nothing new.
            self.router.wait(START)
        self.router_port = free_port()
        where = f"engine={P},daemon={self.link.hosts[0]}:{self.nodes['p'].port}"
        command = [sys.executable, "-m", "kvpush_router", "--port", str(self.router_port)]
        command += ["--prefill", f"{self.front.urls[P]},{where}", "--decode", self.front.urls[D]]
        with (self.folder / "router.log").open("ab") as log:
            self.router = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for("the router listens", lambda: b"serving" in self._router_said(), START)

    def _router_listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.router_port), timeout=1).close()
        except ConnectionRefusedError:
            return False
        return True

    def _router_said(self) -> bytes:
        lines = (self.folder / "router.log").read_bytes().splitlines()
        mine = f":{self.router_port}".encode()
        return b"\n".join(line for line in lines if mine in line)

    def stop_router(self) -> None:
        """Ends router and front."""
        if self.router is not None:
            self.router.send_signal(signal.SIGCONT)
            self.router.kill()
            self.router.wait()
            self.router = None
        if self.front is not None:
            self.front.close()
            self.front = None


def wait_for(what: str, holds: Callable[[], Any], seconds: float) -> Any:
    """Asks until the answer is true, and returns it. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)
    return found


def body_of(legs: Legs) -> bytes:
    """A prompt as a router's client sends it."""
    return json.dumps({"model": "clockwork", "prompt": legs.tokens, "max_tokens": legs.count}).encode()
