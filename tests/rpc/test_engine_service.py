# SPDX-License-Identifier: Apache-2.0
"""The service against clients that are wrong, slow or gone: each gets its status, the others go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvpush_client import hello_wire, item_wire
from kvpush_client._proto import engine_pb2, types_pb2
from kvpush_client.errors import DaemonRefused
from kvpush_client.events import Matched, Reason, Side
from kvpush_client.items import Advance, Reserve
from kvpush_client.session import Session
from kvpushd.errors import KvpushError
from kvpushd.rpc.engine import EngineService
from testing.front import (
    BLOCKS,
    DEADLINE,
    SENDERS,
    Daemon,
    Desk,
    new_key,
    scheduler,
    until,
    worker,
)
from tests.rpc.engine_kit import Client, serves

Clients = Callable[[], Client]


def hello(**fields: object) -> engine_pb2.SessionRequest:
    said = hello_wire.hello_to_wire(scheduler())
    for name, value in fields.items():
        setattr(said, name, value)
    return engine_pb2.SessionRequest(hello=said)


INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (engine_pb2.SessionRequest(), INVALID),
        (engine_pb2.SessionRequest(items=[engine_pb2.EngineItem()]), INVALID),
        (hello(protocol=2), (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED")),
        (hello(role=0), INVALID),
        (hello(role=77), INVALID),
        (hello(engine_id=""), INVALID),
        (hello(launch="x" * 600), INVALID),
        (hello(world_size=0), INVALID),
        (hello(rank=1), INVALID),
        (hello(local_ranks=2), INVALID),
    ],
)
def test_a_wrong_first_message_is_answered_by_a_status_with_a_reason(
    first: engine_pb2.SessionRequest,
    expected: tuple[grpc.StatusCode, str],
    daemon: Daemon,
    clients: Clients,
    runtime_dir: Path,
) -> None:
    client = clients()
    client.send(first)
    assert client.refusal() == expected
    assert serves(runtime_dir)


def test_bytes_that_are_no_message_end_their_stream_only(daemon: Daemon, runtime_dir: Path) -> None:
    with grpc.insecure_channel(f"unix:{runtime_dir}/kvpushd.sock") as channel:
        garbage = channel.stream_stream("/kvpush.v1.EngineService/Session")
        with pytest.raises(grpc.RpcError):
            next(garbage(iter([b"\xff\xff\xff\xff garbage"])))
    assert serves(runtime_dir)


def test_bytes_that_are_no_http_end_their_connection_only(daemon: Daemon, runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(DEADLINE)
        raw.connect(str(runtime_dir / "kvpushd.sock"))
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
        while raw.recv(4096):
            pass
    assert serves(runtime_dir)


KEY = types_pb2.TransferKey(transfer_id=bytes(16))


@pytest.mark.parametrize(
    ("item", "names_half", "detail"),
    [
        (engine_pb2.EngineItem(), False, "the item is empty"),
        (engine_pb2.EngineItem(reserve=engine_pb2.Reserve(end=1)), False, "transfer_id is 0 bytes, not 16"),
        (engine_pb2.EngineItem(reserve=engine_pb2.Reserve(key=KEY)), True, "positions [0, 0) are empty"),
        (engine_pb2.EngineItem(reserve=engine_pb2.Reserve(key=KEY, end=1)), True, "number of senders is 0"),
        (
            engine_pb2.EngineItem(handoff=engine_pb2.Handoff(key=KEY, seal=1 << 31)),
            True,
            "seal is 2147483648",
        ),
        (engine_pb2.EngineItem(handoff=engine_pb2.Handoff(key=KEY, label="x" * 600)), True, "label has 600"),
        (engine_pb2.EngineItem(cancel=engine_pb2.Cancel(key=KEY)), False, "side is 0"),
        (engine_pb2.EngineItem(advance=engine_pb2.Advance(key=KEY)), False, "Advance is for a worker to say"),
    ],
)
def test_a_wrong_item_is_rejected_and_the_session_goes_on(
    item: engine_pb2.EngineItem, names_half: bool, detail: str, daemon: Daemon, clients: Clients
) -> None:
    client = clients()
    client.welcome(scheduler())
    good = item_wire.item_to_wire(Reserve(new_key(), SENDERS, 0, 16, BLOCKS))
    client.send(engine_pb2.SessionRequest(items=[item, good]))
    (event,) = next(client.call).events
    assert event.rejected.HasField("key") is names_half
    assert detail in event.rejected.fault.detail
    assert isinstance(daemon.desk.items.get(timeout=DEADLINE), Reserve)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (engine_pb2.SessionRequest(items=[engine_pb2.EngineItem()] * 4097), "4097 items in a message"),
        (hello(), "a second hello"),
    ],
)
def test_a_message_of_too_much_ends_its_session_and_no_other(
    said: engine_pb2.SessionRequest, words: str, daemon: Daemon, clients: Clients, runtime_dir: Path
) -> None:
    client = clients()
    client.welcome(scheduler())
    client.send(said)
    with pytest.raises(grpc.RpcError, match=words):
        for _ in client.call:
            pass
    assert serves(runtime_dir)


def test_a_worker_opens_no_halves(daemon: Daemon, clients: Clients) -> None:
    client = clients()
    client.welcome(worker())
    reserve = item_wire.item_to_wire(Reserve(new_key(), SENDERS, 0, 16, BLOCKS))
    advance = item_wire.item_to_wire(Advance(new_key(), 16))
    client.send(engine_pb2.SessionRequest(items=[reserve, advance]))
    (event,) = next(client.call).events
    assert event.rejected.fault.reason == types_pb2.REASON_FORBIDDEN
    assert isinstance(daemon.desk.items.get(timeout=DEADLINE), Advance)


def test_a_client_that_never_reads_is_cut_off_and_the_others_are_not(
    daemon: Daemon, clients: Clients, runtime_dir: Path
) -> None:
    deaf = clients()
    deaf.welcome(scheduler("deaf"))
    # What gRPC buffers is full at some point; then the events of the session pile up.
    flood = [Matched(new_key(), Side.RECEIVER)] * 500

    def gone() -> bool:
        daemon.tell(*flood)
        return not daemon.desk.gone.empty()

    until(gone)
    assert daemon.desk.gone.get(timeout=DEADLINE) == scheduler("deaf")
    assert serves(runtime_dir)
    assert deaf.refusal() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVER_LIMIT")


@pytest.mark.parametrize("how", ["finish", "close"])
def test_a_session_leaves_once_however_it_ends(how: str, daemon: Daemon, clients: Clients) -> None:
    client = clients()
    client.welcome(scheduler())
    getattr(client, how)()
    assert daemon.desk.gone.get(timeout=DEADLINE) == scheduler()
    daemon.stop()
    assert daemon.desk.gone.empty()


def test_a_process_that_goes_away_while_it_waits_for_its_welcome_never_was(
    daemon: Daemon, clients: Clients, runtime_dir: Path
) -> None:
    daemon.set_hold(True)
    client = clients()
    client.hello(scheduler("hasty"))
    until(lambda: daemon.desk.waiting == 1)
    client.close()
    until(lambda: daemon.desk.waiting == 0)
    daemon.set_hold(False)
    assert serves(runtime_dir)
    assert daemon.desk.joined.get(timeout=DEADLINE) == scheduler("probe")
    assert daemon.desk.gone.get(timeout=DEADLINE) == scheduler("probe")


def test_sessions_beyond_the_limit_are_refused(runtime_dir: Path) -> None:
    daemon = Daemon(runtime_dir, most_sessions=1)
    first = Session(runtime_dir, scheduler("first"))
    second = Session(runtime_dir, scheduler("second"))
    try:
        first.start()
        first.wait_ready(DEADLINE)
        second.start()
        with pytest.raises(DaemonRefused, match="1 sessions are open") as refused:
            second.wait_ready(DEADLINE)
        assert refused.value.reason is Reason.OVER_LIMIT
    finally:
        first.close()
        second.close()
        daemon.stop()


def test_a_daemon_that_ends_welcomes_nobody_who_waits_or_comes(daemon: Daemon, clients: Clients) -> None:
    """A welcome is proof that nothing of what the launch had before can be touched: its movers live yet."""
    daemon.set_hold(True)
    waits, comes = clients(), clients()
    waits.hello(scheduler("waits"))
    until(lambda: daemon.desk.waiting == 1)
    daemon.welcome_nobody()
    daemon.set_hold(False)
    comes.hello(scheduler("comes"))
    for client in (waits, comes):
        with pytest.raises(grpc.RpcError, match="the daemon stops"):
            next(iter(client.call))
        assert client.refusal() == (grpc.StatusCode.UNAVAILABLE, "PEER_UNREACHABLE")
    assert daemon.desk.joined.get(timeout=DEADLINE) == daemon.desk.gone.get(timeout=DEADLINE)
    assert daemon.desk.joined.empty()


class Draining(KvpushError):
    reason = Reason.DRAINING


def test_a_desk_may_say_no_to_a_hello_in_its_own_words(daemon: Daemon, clients: Clients) -> None:
    daemon.desk.refusal = Draining("kvpushd drains: use another node")
    client = clients()
    client.hello(scheduler())
    assert client.refusal() == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_a_process_that_goes_away_as_it_is_let_in_has_left() -> None:
    class Waiting:
        """A stream whose client has said hello, and reads nothing."""

        def __init__(self) -> None:
            self.writing = asyncio.Event()

        async def read(self) -> engine_pb2.SessionRequest:
            return engine_pb2.SessionRequest(hello=hello_wire.hello_to_wire(scheduler()))

        async def write(self, message: engine_pb2.SessionResponse) -> None:
            self.writing.set()
            await asyncio.Event().wait()

    async def story() -> None:
        desk, context = Desk(), Waiting()
        desk.hold = asyncio.Event()
        call = asyncio.ensure_future(EngineService(desk).Session(None, context))
        await asyncio.wait_for(context.writing.wait(), DEADLINE)
        joined = asyncio.get_running_loop().run_in_executor(None, desk.joined.get, True, DEADLINE)
        desk.hold.set()
        await joined
        call.cancel()
        await asyncio.wait([call], timeout=DEADLINE)
        assert desk.gone.get_nowait() == scheduler()

    asyncio.run(story())
