# SPDX-License-Identifier: Apache-2.0
"""A daemon's front without a daemon behind it: the real services, and a desk that records.

`Daemon` runs it on a thread, `DaemonProcess` in a child that can be killed and stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from kvpush_client.event_wire import DaemonEvent, PoolReady
from kvpush_client.events import Event, Fault, HandoffEnded, Reason, ReservationEnded, Side, TransferKey
from kvpush_client.items import Cancel, DescribePool, Identity, Item, Reserve, Role, Sender, Welcome
from kvpush_client.layout import Blocks, Group, Layer, Layout, Plane
from kvpush_client.session import Session
from kvpushd.errors import KvpushError
from kvpushd.rpc import sockets
from kvpushd.rpc.engine import EngineService, EngineSession, serve_engines
from kvpushd.rpc.fds import FdService
from kvpushd.rpc.file import File

T = TypeVar("T")
E = TypeVar("E", bound=Event)

DEADLINE = 60.0
ROOT = Path(__file__).resolve().parents[1]
LOCK = b"lock"
"""What all fronts hold that do not say otherwise: they follow each other in one runtime directory."""
SENDERS = (Sender("prefill", "node-p", 4711),)
BLOCKS = (Blocks(0, 0, (3, 1, 4)),)
LAYOUT = Layout(4096, 4, (Group(16),), (Layer("layer.0", 0, 0, 1, 1, (Plane(0, 1024, 1024, 64, 64),)),))


def new_key() -> TransferKey:
    """A key that nobody has used."""
    return TransferKey(os.urandom(16))


def scheduler(launch: str = "launch") -> Identity:
    """A scheduler of the engine `engine`."""
    return Identity("engine", launch, Role.SCHEDULER, fingerprint={"model": "m"}, software="test")


def worker(launch: str = "launch") -> Identity:
    """Its only worker."""
    return Identity("engine", launch, Role.WORKER, fingerprint={"model": "m"}, software="test")


class Desk:
    """Takes everybody in, says that every pool is ready, records the rest.

    A reservation whose label is "land" lands at once; a cancelled half ends at once.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.joined: queue.SimpleQueue[Identity] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[Identity] = queue.SimpleQueue()
        self.pools: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self.refusal: KvpushError | None = None
        self.item_refusal: KvpushError | None = None
        self.pool_refusal: KvpushError | None = None
        self.hold: asyncio.Event | None = None
        self.waiting = 0

    async def join(self, identity: Identity, session: EngineSession) -> Welcome:
        """Takes everybody in, unless `refusal` is set; waits while `hold` is set and not opened."""
        if self.refusal is not None:
            raise self.refusal
        if self.hold is not None:
            self.waiting += 1
            try:
                await self.hold.wait()
            finally:
                self.waiting -= 1
        self.joined.put(identity)
        return Welcome(os.urandom(16), 30.0, "node-d", 4712, "test")

    def item(self, session: EngineSession, item: Item) -> None:
        """Records, and answers as a daemon would; or raises `item_refusal`."""
        if self.item_refusal is not None:
            raise self.item_refusal
        self.items.put(item)
        match item:
            case DescribePool(pool_id):
                session.tell(PoolReady(pool_id))
            case Reserve(key, label="land"):
                session.tell(ReservationEnded(key, None, released=True))
            case Cancel(key, Side.RECEIVER):
                session.tell(ReservationEnded(key, Fault(Reason.CANCELLED, ""), released=True))
            case Cancel(key, Side.SENDER):
                session.tell(HandoffEnded(key, Fault(Reason.CANCELLED, "")))
            case _:
                pass

    def left(self, session: EngineSession) -> None:
        """Records."""
        self.gone.put(session.identity)

    def offer(self, session: EngineSession, fd: int, nbytes: int, uid: int) -> bytes:
        """Records the descriptor's size, what was said, and who; or raises `pool_refusal`."""
        if self.pool_refusal is not None:
            raise self.pool_refusal
        self.pools.put((os.fstat(fd).st_size, nbytes, uid))
        os.close(fd)
        return b"pool"


class Front:
    """The two sockets of a daemon, served on the running loop."""

    def __init__(self, runtime_dir: Path, desk: Desk, service: EngineService) -> None:
        self._runtime_dir = runtime_dir
        self._desk = desk
        self.service = service
        self._server: grpc.aio.Server | None = None
        self._fds: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._files: list[File] = []

    async def open(self, lifeline: int) -> None:
        """Binds both, and serves until `close`."""
        self._listener, memory = sockets.listen(self._runtime_dir / "fd.sock", socket.SOCK_SEQPACKET)
        fds = FdService(self._listener, self.service.bearer, self._desk, lifeline)
        self._fds = asyncio.create_task(fds.serve())
        self._server, engines = await serve_engines(self.service, self._runtime_dir / "kvpushd.sock")
        self._files = [memory, engines]

    async def close(self) -> None:
        """As a daemon that ends well."""
        assert self._server is not None
        assert self._fds is not None
        assert self._listener is not None
        for file in self._files:
            file.remove()
        await self._server.stop(0)
        self._fds.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._fds
        self._listener.close()


class Daemon:
    """A front on a thread with a loop of its own."""

    def __init__(
        self,
        runtime_dir: Path,
        desk: Desk | None = None,
        *,
        most_events: int = 100_000,
        most_sessions: int = 1024,
        lock: bytes = LOCK,
    ) -> None:
        self.desk = desk or Desk()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="daemon")
        self._thread.start()
        self._lifeline, self._life = os.pipe()
        service = EngineService(self.desk, most_events=most_events, most_sessions=most_sessions, lock=lock)
        self._front = Front(runtime_dir, self.desk, service)
        self.run(self._front.open(self._lifeline))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the daemon's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def tell(self, *events: DaemonEvent) -> None:
        """To all sessions."""

        async def told() -> None:
            for session in self._front.service:
                for event in events:
                    session.tell(event)

        self.run(told())

    def set_hold(self, held: bool) -> None:
        """Has welcomes wait, or go on."""

        async def set_it() -> None:
            if held:
                self.desk.hold = asyncio.Event()
            elif self.desk.hold is not None:
                self.desk.hold.set()

        self.run(set_it())

    def welcome_nobody(self) -> None:
        """As a daemon that is about to end."""

        async def stop() -> None:
            self._front.service.stop()

        self.run(stop())

    def stop(self, *, movers_live: bool = False) -> None:
        """Ends it; its lifeline too, unless its movers live on."""
        if self._thread.is_alive():
            self.run(self._front.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            os.close(self._lifeline)
            if movers_live:
                return
        self.end_movers()

    def end_movers(self) -> None:
        """Closes the lifeline's last write end."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


class DaemonProcess:
    """A front in a child process."""

    def __init__(self, runtime_dir: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "testing.front", str(runtime_dir)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == "ready\n"

    def send(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; harmless to repeat."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()


async def _serve(runtime_dir: Path) -> None:
    lifeline, _life = os.pipe()
    desk = Desk()
    front = Front(runtime_dir, desk, EngineService(desk, lock=LOCK))
    await front.open(lifeline)
    print("ready", flush=True)
    await asyncio.Event().wait()


class Engine:
    """A session, and what was polled from it so far."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seen: list[Event] = []

    def poll(self) -> None:
        """Sees what there is."""
        self.seen.extend(self.session.poll())

    def await_event(self, kind: type[E], *, count: int = 1, timeout: float = DEADLINE) -> E:
        """Polls until `count` events of a kind were seen in all; returns the last of them."""
        found: list[E] = []

        def enough() -> bool:
            self.poll()
            found[:] = [event for event in self.seen if isinstance(event, kind)]
            return len(found) >= count

        until(enough, timeout, lambda: f"{count} {kind.__name__} among {self.seen[-5:]}")
        return found[count - 1]

    def of(self, key: TransferKey) -> list[Event]:
        """All that was seen of a transfer."""
        self.poll()
        return [event for event in self.seen if getattr(event, "key", None) == key]

    def reserve(self, key: TransferKey, label: str = "") -> None:
        """A reservation of three blocks."""
        self.session.reserve(key, SENDERS, 0, 48, BLOCKS, label=label)


def until(condition: Callable[[], bool], timeout: float = DEADLINE, what: Callable[[], str] = str) -> None:
    """Waits for a condition of another thread."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain: {what()}"
        time.sleep(0.001)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
