# SPDX-License-Identifier: Apache-2.0
"""kvpushd: wires the rooms, starts them, drains and stops them. Reads as the floor plan."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version

import structlog
import uvloop
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from prometheus_client import CollectorRegistry

from kvpush_client.events import Fault
from kvpushd.core.engines import Limits
from kvpushd.core.events import DrainBegan, MoverDied
from kvpushd.core.ledger import Ledger
from kvpushd.core.words import SECOND
from kvpushd.errors import KvpushError
from kvpushd.http import HttpPort
from kvpushd.logs import Sparing
from kvpushd.metrics import Metrics
from kvpushd.mover.child import MoverProcess, MoverSettings, StartMover
from kvpushd.node.descriptors import Descriptors
from kvpushd.node.engines import EngineRoom
from kvpushd.node.floor import Floor
from kvpushd.node.history import History
from kvpushd.node.hub import Hub
from kvpushd.node.movers import Movers
from kvpushd.node.receiving import ReceivingRoom
from kvpushd.node.sending import SendingRoom
from kvpushd.node.tasks import Tasks
from kvpushd.node.view import NodeFacts, View
from kvpushd.notify import Notify
from kvpushd.rpc import sockets, tls
from kvpushd.rpc.admin import AdminService, serve_admin
from kvpushd.rpc.engine import EngineService, serve_engines
from kvpushd.rpc.fds import FdService
from kvpushd.rpc.links import Links
from kvpushd.rpc.peer import PeerService, serve_peers
from kvpushd.rpc.runtime_dir import RuntimeDir
from kvpushd.rpc.terms import Terms, agent_prefix
from kvpushd.settings import Settings
from kvpushd.tracing import open_traces

SOFTWARE = f"kvpushd {version('kvpushd')}"
TICK = 0.1
"""Seconds between looks at leases: how late one may end."""
IDLE_TICK = 1.0
"""The same while nothing is held: only what is remembered of what ended waits to be forgotten."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a daemon talks through, each made as these are: a test build puts others in their place."""

    engines: Callable[..., EngineService] = EngineService
    fds: Callable[..., FdService] = FdService
    peers: Callable[..., PeerService] = PeerService
    links: Callable[..., Links] = Links
    admin: Callable[..., AdminService] = AdminService
    mover: StartMover = MoverProcess.start


def run(settings: Settings, parts: Parts | None = None) -> int:
    """Runs the daemon until a signal ends it. 0 = ended in order; 1 = it could not start, or its runtime
    directory was taken from it."""
    try:
        return uvloop.run(Daemon(settings, parts or Parts()).serve())
    except (KvpushError, OSError) as error:
        structlog.get_logger("kvpushd").error("can't start", fault=str(error))
        return 1


class Daemon:
    """One node's daemon."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._place = RuntimeDir(settings.runtime_dir, settings.socket_group)
        self._boot = secrets.token_bytes(16)
        # Also where no peers are taken: engines of this node find each other by it.
        self._peer_port = settings.peer_port
        self._draining = False
        self._tasks = Tasks("daemon")
        self._health = health_aio.HealthServicer()
        self._told = asyncio.Event()
        self._signalled_before = False
        self._broke = False
        self._stop = asyncio.Event()
        self._log = structlog.get_logger("kvpushd")
        self._descriptors = Descriptors(self._log)
        self._notify = Notify(os.environ)

    async def serve(self) -> int:
        """From start to stop. Raises KvpushError where something can't be opened."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            lock = await self._place.own()
            stack.callback(os.close, lock)
            self._place.let_in()
            lifeline, held = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, lifeline)
            stack.callback(os.close, held)

            self._security = tls.choose(
                settings.tls,
                insecure=settings.insecure_peers,
                allowed=settings.allowed_peers,
                node=settings.node,
                host=settings.advertised_host,
            )
            self._metrics = Metrics(CollectorRegistry(), settings.node, version("kvpushd"))
            traces = open_traces(settings.otlp_endpoint, settings.node, version("kvpushd"))
            stack.callback(traces.close)
            self._ledger = Ledger(_limits(settings))
            self._hub = hub = Hub(self._ledger)
            self._history = History(hub, self._metrics, traces, settings.limits.history)

            self._movers = movers = Movers(
                hub,
                self._mover_settings,
                (held, lock),
                self._mover_died,
                lambda: self._engines.map_again(),
                silence=settings.mover_silence,
                # By then the receiver has long been told, and has closed its inlet.
                write_patience=2 * settings.lease,
                start=self._parts.mover,
            )
            await movers.start()
            stack.push_async_callback(movers.stop)
            self._engines = engines = EngineRoom(
                hub,
                movers,
                lease=settings.lease,
                peer_address=self._peer_address,
                software=SOFTWARE,
                first_token=self._history.first_token,
                metrics=self._metrics,
            )
            self._receiving = ReceivingRoom(
                hub, movers, engines, self._agent("in"), self._link_down, self._metrics.inlet_destroyed
            )
            self._sending = SendingRoom(hub, movers, engines, self._peer_refused, self._link_down)
            hub.afterwards(lambda: movers.attend(self._ledger.attention))
            self._floor = Floor(
                settings.link_floor,
                lambda: [guest.name for guest in self._sending.guests()],
                self._ledger.rate,
                lambda: " ".join(movers.handle.lanes) if movers.handle else "",
            )
            self._view = self._make_view()
            self._sparing = Sparing(self._log)

            tasks = self._tasks
            stack.push_async_callback(tasks.close)
            await self._open(stack, lifeline, tasks)
            watches = [movers.watch(), hub.tick(TICK, IDLE_TICK), self._watch_place()]
            watches += [each.watch() for each in (self._floor, self._security, self._descriptors)]
            for watch in (*watches, self._metrics.watch_loop(), self._notify.watch(self._is_well)):
                tasks.start(watch, self._broken)
            # What the start made lives as long as the process: the collector need not look at it again.
            gc.freeze()
            return await self._until_told(tasks)

    # --- opening -----------------------------------------------------------------------------------------

    async def _open(self, stack: AsyncExitStack, lifeline: int, tasks: Tasks) -> None:
        """Opens every socket; the engines' last, so that whoever connects finds all else there."""
        settings, limits = self._settings, self._settings.limits
        place, health = self._place, self._health
        terms = Terms(
            settings.node,
            self._boot,
            SOFTWARE,
            settings.link_silence,
            settings.connect_timeout,
            limits.message_bytes,
            limits.items_per_message,
            limits.queued_items,
            limits.links_per_node,
        )
        if self._has_peers:
            self._receiving.use(self._parts.links(terms, self._security, self._receiving))
            address = f"{settings.peer_host}:{settings.peer_port}"
            peers = self._parts.peers(terms, self._security, self._sending)
            server, self._peer_port = await serve_peers(peers, health, self._security, terms, address)
            stack.push_async_callback(server.stop, None)
        else:
            self._log.warning("no peers: neither [tls] nor insecure_peers is configured")

        admin = self._parts.admin(self._view, self._count("admin"))
        server, file = await serve_admin(admin, health, place.admin, mode=settings.socket_mode)
        stack.push_async_callback(server.stop, None)
        stack.callback(place.keep(file).remove)
        metrics = self._metrics
        http = HttpPort(metrics.registry, lambda: metrics.holding(self._view.holding()), self._problems)
        http_port = await http.open(settings.http_host, settings.http_port)
        stack.push_async_callback(http.close)

        service = self._parts.engines(
            self._engines,
            most_events=limits.queued_items,
            most_items=limits.items_per_message,
            lock=place.lock,
            rejected=self._count("engine"),
        )
        listener, file = sockets.listen(place.memory, socket.SOCK_SEQPACKET, mode=settings.socket_mode)
        stack.callback(listener.close)
        stack.callback(place.keep(file).remove)
        fds = self._parts.fds(
            listener, service.bearer, self._engines, lifeline, rejected=self._count("memory")
        )
        tasks.start(fds.serve(), self._broken)
        engines, file = await serve_engines(
            service, place.engines, mode=settings.socket_mode, silence=settings.engine_silence
        )
        stack.push_async_callback(engines.stop, None)
        stack.callback(place.keep(file).remove)
        stack.push_async_callback(self._close_rooms)
        stack.callback(service.stop)
        place.hand_over()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._notify.ready(f"node {settings.node}")
        self._log.info(
            "ready",
            node=settings.node,
            runtime_dir=str(place.path),
            peers=f"{settings.advertised_host}:{self._peer_port}" if self._has_peers else "none",
            http=f"{settings.http_host}:{http_port}",
        )

    async def _close_rooms(self) -> None:
        await self._engines.close()
        await self._receiving.close()
        await self._sending.close()

    # --- running -----------------------------------------------------------------------------------------

    async def _until_told(self, tasks: Tasks) -> int:
        """SIGTERM, SIGINT and the loss of the runtime directory drain; a second signal stops now."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        await self._told.wait()
        self._drain()
        self._notify.stopping("draining")
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                await self._idle_or_stopped()
        except TimeoutError:
            held = self._view.held()
            self._log.warning("drain timed out", reservations=held.reservations, handoffs=held.handoffs)
        self._log.info("stopping")
        return 1 if self._broke else 0

    def _signalled(self) -> None:
        if self._signalled_before:
            self._stop.set()
        self._signalled_before = True
        self._told.set()

    def _broken(self) -> None:
        """What lasts as long as the daemon has failed: another start mends that."""
        self._broke = True
        self._told.set()
        self._stop.set()

    async def _watch_place(self) -> None:
        """Ends the daemon, to be started again, once no engine finds it at its path any more."""
        while not self._told.is_set():
            problem = self._place.problem()
            if problem is not None:
                remedy = "it ends, to be started again: find out what removes files there"
                self._log.error("runtime directory lost", fault=f"{problem}; {remedy}")
                self._broke = True
                self._told.set()
            await asyncio.sleep(IDLE_TICK)

    async def _idle_or_stopped(self) -> None:
        idle = asyncio.Event()
        self._hub.afterwards(lambda: idle.set() if self._ledger.idle else None)
        waits = [asyncio.ensure_future(idle.wait()), asyncio.ensure_future(self._stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._log.info("idle" if self._ledger.idle else "stopped before it was idle")

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self._log.info("draining")
            self._hub.feed(DrainBegan())
            self._engines.drain()
            self._tasks.start(self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING))

    # --- what the rooms ask for, and tell ----------------------------------------------------------------

    def _peer_address(self) -> tuple[str, int]:
        return self._settings.advertised_host, self._peer_port

    @property
    def _has_peers(self) -> bool:
        return not isinstance(self._security, tls.NoPeers)

    def _agent(self, what: str) -> str:
        """A name for transport agents: unique among all nodes and all starts."""
        return f"{agent_prefix(self._settings.node, self._boot)}{what}"

    def _mover_settings(self, number: int) -> MoverSettings:
        ucx = self._settings.ucx
        return MoverSettings(
            agent=self._agent(f"out-{number}"),
            ucx_tls=ucx.tls,
            net_devices=ucx.net_devices,
            environment=ucx.env,
            verify=self._settings.verify,
            fault="corrupt-writes" if self._settings.faults.corrupt_writes else None,
        )

    def _mover_died(self, fault: Fault) -> None:
        self._metrics.mover_restarted()
        self._engines.forget_mappings()
        self._receiving.forget_inlets()
        self._sending.drop_links(fault.detail)
        self._hub.feed(MoverDied(frozenset(entry.incarnation for entry in self._engines)))

    def _count(self, source: str) -> Callable[[KvpushError], None]:
        return lambda error: self._metrics.rejected(source, error.reason)

    def _peer_refused(self, address: str, fault: Fault) -> None:
        self._metrics.rejected("peer", fault.reason)
        host = address.rpartition(":")[0]
        self._sparing.warning(
            f"{host} {fault.reason.name}", "peer refused", address=address, fault=str(fault)
        )

    def _link_down(self, role: str, fault: Fault) -> None:
        self._metrics.link_down(role, fault)

    def _is_well(self) -> bool:
        """What the watchdog hears, as the loop turns: the mover turns too, or another is being started."""
        handle = self._movers.handle
        if handle is None:
            return True
        silent = asyncio.get_running_loop().time() - handle.last_beat
        return silent < 2 * self._settings.mover_silence

    def _make_view(self) -> View:
        return View(
            NodeFacts(self._settings.node, SOFTWARE, time.time_ns(), self._security.word),
            self._ledger,
            self._engines,
            self._movers,
            self._receiving,
            self._sending,
            self._history,
            self._floor,
            peer_address=self._peer_address,
            problems=self._problems,
            draining=lambda: self._draining,
            drain=self._drain,
        )

    def _problems(self) -> list[str]:
        problems = []
        if self._draining:
            problems.append("it drains")
        if self._movers.problem is not None:
            problems.append(self._movers.problem)
        if (lost := self._place.problem()) is not None:
            problems.append(lost)
        if self._descriptors.problem is not None:
            problems.append(self._descriptors.problem)
        return problems


def _limits(settings: Settings) -> Limits:
    return Limits(
        lease=int(settings.lease * SECOND),
        fence_patience=int(settings.fence_patience * SECOND),
        pinned_share=settings.pinned_share,
        halves_per_engine=settings.limits.halves_per_engine,
        write_bytes=settings.window_bytes,
        link_bytes=settings.peer_bytes_in_flight,
    )
