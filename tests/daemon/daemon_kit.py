# SPDX-License-Identifier: Apache-2.0
"""Nodes, engines and what a test of real daemons says of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import trustme

from kvpush_client._proto import admin_pb2
from kvpush_client.events import HandoffEnded, ReservationEnded, TransferKey
from testing.node import DEADLINE, Node
from testing.processes import spares_of
from testing.rank import BLOCK, Engine, Place, new_key

_names = itertools.count()

LARGE = {"blocks": 256, "cell": 1024}
"""An engine of 32 MiB: more than the sockets between two movers hold."""


def eventually(
    look: Callable[[], Any], wanted: Callable[[Any], bool] = bool, timeout: float = DEADLINE
) -> Any:
    """What `look` sees once it is wanted. AssertionError with what it saw last after the deadline."""
    deadline = time.monotonic() + timeout
    while not wanted(seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s still {seen!r}")
        time.sleep(0.005)
    return seen


def leftovers(node: Node) -> dict[str, int]:
    """What a node holds, but for its links, which stay up. Empty = nothing."""
    status = node.status()
    held = {field.name: value for field, value in status.held.ListFields() if field.name != "links"}
    mover = status.movers[0]
    return held | {k: v for k, v in (("mapped", mover.pools), ("inlets", mover.inlets)) if v}


@dataclass
class Nodes:
    """Three nodes, and the engines that a test has on them: P's on `p`, D's on `d`, others on `e`."""

    p: Node
    d: Node
    e: Node
    stack: ExitStack

    def engine(self, node: Node, **how: Any) -> Engine:
        """An engine with a name of its own, until the test ends."""
        return self.stack.enter_context(Engine(node, f"engine-{next(_names)}", **how))

    def pair(self, **how: Any) -> tuple[Engine, Engine]:
        """A sender on `p` and a receiver on `d`."""
        return self.engine(self.p, **how), self.engine(self.d, **how)

    def far_engine(self, node: Node, **how: Any) -> FarEngine:
        """An engine in a process of its own, until the test ends."""
        return self.stack.enter_context(FarEngine(node, f"engine-{next(_names)}", **how))


def transfer(p: Engine, d: Engine, *, blocks: int = 4, seed: int = 1, at: int = 0) -> TransferKey:
    """One whole transfer, byte for byte, into D's blocks from `at` on."""
    key, ids = new_key(), range(blocks)
    into = range(at, at + blocks)
    p.fill(ids, seed)
    d.reserve(key, p, into, blocks * BLOCK)
    p.send(key, ids, blocks * BLOCK)
    landed(p, d, key)
    assert_same(p, ids, d, into, blocks * BLOCK)
    return key


def landed(p: Engine, d: Engine, key: TransferKey) -> ReservationEnded:
    """Waits for both good ends."""
    end = d.wait_for(ReservationEnded, key)
    assert end.fault is None, end
    assert end.released
    assert p.wait_for(HandoffEnded, key).fault is None
    return end


def assert_same(
    p: Engine, source: Sequence[int], d: Engine, target: Sequence[int], end: int, start: int = 0
) -> None:
    """Positions [start, end) hold the same; `target` holds positions from 0 on, as `source` does."""
    np.testing.assert_array_equal(p.read(source, start, end), d.read(target, start, end))


class FarEngine:
    """An engine in a child process, which can be killed. Its methods are Engine's, by `call`."""

    def __init__(self, node: Place, engine_id: str, **how: Any) -> None:
        self.engine_id = engine_id
        self.node = node
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        there = _There(node.runtime_dir, node.port)
        self._process = spawn.Process(target=_serve, args=(theirs, there, engine_id, how), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> FarEngine:
        self._answer()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the Engine over there; raises what it raises."""
        self._pipe.send((method, args, kwargs))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(2 * DEADLINE):
            raise AssertionError(f"{self.engine_id} does not answer")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """SIGKILL, be it stopped or not; returns once it is gone."""
        self._process.kill()
        self._process.join()


@dataclass(frozen=True)
class _There:
    runtime_dir: Path
    port: int


def _serve(pipe: Connection, there: _There, engine_id: str, how: dict[str, Any]) -> None:
    with Engine(there, engine_id, **how) as engine:
        pipe.send(None)
        while True:
            method, args, kwargs = pipe.recv()
            try:
                pipe.send(getattr(engine, method)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001, raised over there
                pipe.send(error)


def papers(folder: Path, authority: trustme.CA, name: str, **how: Any) -> dict[str, Any]:
    """Settings with a certificate for a node; said again, they name the same files, replaced."""
    made = authority.issue_cert(name, "127.0.0.1", **how)
    files = {part: folder / f"{name}.{part}.pem" for part in ("ca", "cert", "key")}
    files["ca"].write_bytes(authority.cert_pem.bytes())
    files["cert"].write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
    files["key"].write_bytes(made.private_key_pem.bytes())
    return {f"tls__{part}": file for part, file in files.items()}


def alive(pid: int) -> bool:
    """Whether a process has memory of its own, and so could write: one that ends gives that back before
    it closes its files, and is a zombie later still."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def spare_of(node: Node) -> int:
    """The process that a node's next mover is to be, once it stands by."""
    (spare,) = eventually(lambda: spares_of(node.pid))
    return spare


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOPs a process for as long as the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Flight:
    """A transfer, of which `ids` are the blocks on both sides."""

    key: TransferKey
    ids: range
    end: int


@contextmanager
def under_way(nodes: Nodes, p: Engine | FarEngine, d: Engine | FarEngine) -> Iterator[Flight]:
    """A transfer between LARGE engines, matched and not sealed, with bytes under way that do not arrive: the
    receiving mover stands still for as long as the context lasts."""
    flight = Flight(new_key(), range(LARGE["blocks"]), LARGE["blocks"] * BLOCK)
    call(p, "fill", flight.ids, 21)
    call(d, "reserve", flight.key, call(p, "where"), flight.ids, flight.end)
    call(p, "hand_off", flight.key, flight.ids)
    eventually(lambda: phase(nodes.d, flight.key) == admin_pb2.PHASE_MATCHED)
    with stopped(nodes.d.mover_pid):
        call(p, "advance", flight.key, flight.end)
        eventually(lambda: nodes.p.status().held.writes)
        yield flight


def call(engine: Engine | FarEngine, method: str, *args: Any) -> Any:
    """Calls an engine's method, wherever it is."""
    return engine.call(method, *args) if isinstance(engine, FarEngine) else getattr(engine, method)(*args)


def phase(node: Node, key: TransferKey) -> int:
    """Where a transfer stands on a node; 0 = it is not known."""
    return next((t.half.phase for t in node.transfers(key.transfer_id)), 0)
