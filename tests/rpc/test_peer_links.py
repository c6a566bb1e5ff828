# SPDX-License-Identifier: Apache-2.0
"""Links between two nodes: real gRPC, no certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvpush_client._proto import peer_pb2
from kvpush_client._proto.peer_pb2_grpc import PeerServiceStub
from kvpush_client.events import Fault, Reason
from kvpushd.errors import Invalid, OverLimit
from kvpushd.rpc.link import EOF
from kvpushd.rpc.links import check_address
from kvpushd.rpc.peer import HANDSHAKE, PeerService
from kvpushd.rpc.terms import PROTOCOL
from kvpushd.rpc.tls import NoPeers
from tests.rpc.peer_kit import (
    ANYBODY,
    InNotes,
    ended,
    fenced,
    in_loop,
    number_of,
    receiving,
    sending,
    soon,
    terms,
    withdraw,
)

ROOT = Path(__file__).resolve().parents[2]
HELLO = terms("raw").hello()


CHILD = """
import asyncio, json, resource, sys
from tests.rpc.peer_kit import sending
async def main():
    files, changed = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    async with sending("child", **changed) as sender:
        print(sender.address, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def child(files: int = 1024, **said: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A node that takes links in a process of its own, which may open so many files; and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        json.dumps([files, said]),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
    )
    try:
        assert process.stdout
        yield process, (await soon(process.stdout.readline())).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def changed(**fields: Any) -> peer_pb2.PeerHello:
    hello = peer_pb2.PeerHello()
    hello.CopyFrom(HELLO)
    for name, value in fields.items():
        setattr(hello, name, value)
    return hello


@in_loop
async def test_items_arrive_on_both_sides_in_the_order_in_which_they_were_sent() -> None:
    async with sending() as sender, receiving() as (links, heard):
        link = links.dial(sender.address)
        for number in range(500):
            link.send(withdraw(number))  # most of them before the link is up
        back = await soon(sender.notes.ups.get())
        for number in range(500):
            back.send(fenced(number))
        there = [number_of(await soon(sender.notes.items.get())) for _ in range(500)]
        here = [number_of(await soon(heard.items.get())) for _ in range(500)]
        assert there == here == list(range(500))


@in_loop
async def test_items_that_are_said_twice_are_heard_once() -> None:
    async with sending() as sender, grpc.aio.insecure_channel(sender.address) as channel:
        stub: Any = PeerServiceStub(channel)
        call = stub.Link()
        await call.write(peer_pb2.LinkRequest(hello=HELLO))
        await call.write(peer_pb2.LinkRequest(items=[withdraw(0), withdraw(1)], first=0))
        await call.write(peer_pb2.LinkRequest(items=[withdraw(1), withdraw(2)], first=1))
        assert [number_of(await soon(sender.notes.items.get())) for _ in range(3)] == [0, 1, 2]


@in_loop
async def test_a_link_on_which_an_item_is_missing_ends_at_once() -> None:
    async with sending() as sender, grpc.aio.insecure_channel(sender.address) as channel:
        stub: Any = PeerServiceStub(channel)
        call = stub.Link()
        await call.write(peer_pb2.LinkRequest(hello=HELLO))
        await call.write(peer_pb2.LinkRequest(items=[withdraw(0)], first=0))
        await call.write(peer_pb2.LinkRequest(items=[withdraw(3)], first=3))
        _, fault = await soon(sender.notes.downs.get())
        assert fault.reason is Reason.PEER_UNREACHABLE
        assert "2 items were lost on the way" in fault.detail
        assert number_of(await soon(sender.notes.items.get())) == 0
        assert sender.notes.items.empty()


@in_loop
async def test_each_side_learns_the_names_of_the_other() -> None:
    async with sending("p-node") as sender, receiving("d-node") as (links, heard):
        links.dial(sender.address)
        link, hello = await soon(heard.ups.get())
        back = await soon(sender.notes.ups.get())
        assert (hello.node, link.hello.node, back.hello.node) == ("p-node", "p-node", "d-node")
        assert link.up
        assert back.up


@in_loop
async def test_all_engines_share_one_link_per_address() -> None:
    async with sending() as sender, receiving() as (links, heard):
        first = links.dial(sender.address)
        assert links.dial(sender.address) is first
        await soon(heard.ups.get())
        assert links.dial(sender.address) is first
        assert list(links) == [first]


@in_loop
async def test_a_side_beats_at_a_third_of_what_the_other_side_bears() -> None:
    async with sending(silence=60) as sender, grpc.aio.insecure_channel(sender.address) as channel:
        stub: Any = PeerServiceStub(channel)
        call = stub.Link()
        await call.write(peer_pb2.LinkRequest(hello=changed(silence_ms=100)))
        assert (await soon(call.read())).hello.silence_ms == 60_000
        for _ in range(3):
            (beat,) = (await soon(call.read())).items
            assert beat.WhichOneof("item") == "beat"
        call.cancel()


@in_loop
async def test_a_link_that_carries_nothing_outlives_the_silence_of_both_sides_by_its_beats() -> None:
    async with sending(silence=0.3) as sender, receiving(silence=0.3) as (links, heard):
        link = links.dial(sender.address)
        await soon(heard.ups.get())
        # A raw peer that says nothing serves as the clock: it is given up after the same silence.
        async with grpc.aio.insecure_channel(sender.address) as channel:
            stub: Any = PeerServiceStub(channel)
            for _ in range(3):
                call = stub.Link()
                await call.write(peer_pb2.LinkRequest(hello=HELLO))
                _, fault = await soon(sender.notes.downs.get())
                assert fault.detail == "the peer was silent for 0.3 s"
        assert link.up
        assert heard.downs.empty()


@in_loop
async def test_a_refused_connection_is_said_at_once_and_the_next_dial_works_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with receiving(connect_timeout=30) as (links, heard):
        dead = links.dial(f"127.0.0.1:{port}")
        link, fault = await soon(heard.downs.get())
        assert link is dead
        assert fault.reason is Reason.PEER_UNREACHABLE
        async with sending(port=port):
            assert links.dial(f"127.0.0.1:{port}") is not dead
            await soon(heard.ups.get())
        assert heard.ups.empty()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
@in_loop
async def test_who_connects_and_does_not_come_through_the_handshake_is_hung_up_on(said: bytes) -> None:
    async with sending(connect_timeout=0.5) as sender:
        reader, writer = await asyncio.open_connection("127.0.0.1", sender.port)
        writer.write(said)
        async with asyncio.timeout(15):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1024):
                    pass
        writer.close()


@in_loop
async def test_strangers_connections_are_bounded_by_the_files_that_the_process_may_open() -> None:
    # In a process of its own: this one has both ends of all connections, and what other tests left open.
    async with child(files=512, connect_timeout=60) as (_, address):
        host, port = address.rsplit(":", 1)
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(160)]
        told = [asyncio.ensure_future(reader.read()) for reader, _ in strangers]
        ends = asyncio.as_completed(told)
        async with asyncio.timeout(HANDSHAKE / 2):  # after which all of them would end
            for _ in range(160 - 512 // 4):
                await next(ends)
        assert sum(not end.done() for end in told) == 512 // 4
        for end in told:
            end.cancel()
        for _, writer in strangers:
            writer.transport.abort()
        async with receiving() as (links, heard):
            while heard.ups.empty():  # the server hears of its strangers' ends in its own time
                links.dial(address)
                await asyncio.sleep(0.1)


@in_loop
async def test_a_host_that_accepts_and_says_nothing_is_given_up_after_the_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with receiving(connect_timeout=0.3) as (links, heard):
            links.dial(f"127.0.0.1:{mute.getsockname()[1]}")
            _, fault = await soon(heard.downs.get())
            assert fault.reason is Reason.PEER_UNREACHABLE
            assert "did not answer within 0.3 s" in fault.detail


@in_loop
async def test_a_dial_for_which_too_much_waits_before_it_came_up_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with receiving(connect_timeout=3600, queued_items=2) as (links, heard):
            link = links.dial(f"127.0.0.1:{mute.getsockname()[1]}")
            for number in range(3):
                link.send(withdraw(number))
            _, fault = await soon(heard.downs.get())
            assert fault.reason is Reason.OVER_LIMIT


@in_loop
async def test_a_peer_that_stops_its_server_takes_the_link_down_once_on_each_side() -> None:
    async with sending(silence=60) as sender, receiving(silence=60) as (links, heard):
        link = links.dial(sender.address)
        back = await soon(sender.notes.ups.get())
        await soon(heard.ups.get())
        await sender.server.stop(None)
        assert (await soon(heard.downs.get()))[0] is link
        assert (await soon(sender.notes.downs.get()))[0] is back
        assert not link.up
        assert not back.up
        link.send(withdraw(1))  # without effect, and without an error
        back.send(fenced(1))
        assert heard.downs.empty()
        assert sender.notes.downs.empty()


@in_loop
async def test_the_side_that_sends_may_close_and_both_hear_of_it() -> None:
    async with sending(silence=60) as sender, receiving(silence=60) as (links, heard):
        links.dial(sender.address)
        (await soon(sender.notes.ups.get())).close("engine left")
        _, fault = await soon(heard.downs.get())
        assert "engine left" in fault.detail
        await soon(sender.notes.downs.get())


@in_loop
async def test_what_the_desk_refuses_reaches_the_other_side_with_its_reason_and_other_links_live() -> None:
    async with sending() as sender, receiving("good") as (good, good_heard), receiving("bad") as (bad, heard):
        good.dial(sender.address)
        await soon(sender.notes.ups.get())
        other = bad.dial(sender.address)
        await soon(sender.notes.ups.get())
        sender.notes.raises = Invalid("announce.end is before announce.start")
        other.send(withdraw(1))
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.INVALID
        assert fault.detail == "announce.end is before announce.start"
        assert good_heard.downs.empty()
        assert [link.hello.node for link in sender.service] == ["good"]


@in_loop
async def test_the_end_of_a_link_does_not_wait_for_a_peer_that_does_not_read() -> None:
    async with sending(silence=60) as sender, grpc.aio.insecure_channel(sender.address) as channel:
        stub: Any = PeerServiceStub(channel)
        call = stub.Link()
        await call.write(peer_pb2.LinkRequest(hello=terms("raw", silence=60).hello()))
        link = await soon(sender.notes.ups.get())
        for number in range(100):  # more than the connection takes
            link.send(ended(number, padding=100_000))
        sender.notes.raises = Invalid("announce.end is before announce.start")
        await call.write(peer_pb2.LinkRequest(items=[withdraw(1)], first=0))
        down, fault = await soon(sender.notes.downs.get())
        assert (down, fault.reason) == (link, Reason.INVALID)
        assert list(sender.service) == []


@in_loop
async def test_a_refusal_keeps_its_reason_while_the_refused_side_goes_on_writing() -> None:
    async with sending() as sender, receiving() as (links, heard):
        sender.notes.raises = Invalid("announce.end is before announce.start")
        for _ in range(30):
            link = links.dial(sender.address)
            await soon(heard.ups.get())
            while heard.downs.empty():
                link.send(withdraw(1))
                await asyncio.sleep(0)
            _, fault = heard.downs.get_nowait()
            assert fault == Fault(Reason.INVALID, "announce.end is before announce.start")


@in_loop
async def test_a_bug_in_the_desk_ends_the_link_and_says_so() -> None:
    async with sending() as sender, receiving() as (links, heard):
        heard.raises = ZeroDivisionError("a bug")
        links.dial(sender.address)
        (await soon(sender.notes.ups.get())).send(fenced(1))
        _, fault = await soon(heard.downs.get())
        assert "a bug" in fault.detail


@in_loop
async def test_a_bug_in_the_senders_desk_ends_that_link_without_showing_its_inside() -> None:
    async with sending() as sender, receiving() as (links, heard):
        sender.notes.raises = ZeroDivisionError("a bug")
        links.dial(sender.address).send(withdraw(1))
        _, fault = await soon(heard.downs.get())
        assert (fault.reason, fault.detail) == (
            Reason.PEER_UNREACHABLE,
            "internal error; the log of the other node has more",
        )
        assert "a bug" in (await soon(sender.notes.downs.get()))[1].detail


@in_loop
async def test_a_node_that_stood_still_itself_does_not_blame_its_peer() -> None:
    async with sending(silence=60) as sender, receiving(silence=0.3) as (links, heard):
        link = links.dial(sender.address)
        back = await soon(sender.notes.ups.get())
        back.send(fenced(0))
        assert number_of(await soon(heard.items.get())) == 0
        time.sleep(0.9)  # noqa: ASYNC251, the loop of both stands still
        back.send(fenced(1))
        assert number_of(await soon(heard.items.get())) == 1
        assert link.up


@in_loop
async def test_after_all_links_were_closed_nothing_is_up_and_nobody_is_told() -> None:
    async with sending() as sender, receiving() as (links, heard):
        link = links.dial(sender.address)
        await soon(heard.ups.get())
        await links.close()
        await soon(sender.notes.downs.get())
        assert not link.up
        assert heard.downs.empty()
        assert list(links) == []


@in_loop
async def test_a_peer_that_takes_nothing_is_cut_off_when_its_queue_is_full() -> None:
    async with sending(silence=60) as sender, receiving(silence=60, queued_items=1000) as (links, heard):
        link = links.dial(sender.address)
        await soon(heard.ups.get())
        for number in range(1001):
            link.send(withdraw(number))  # without giving the loop a turn
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.OVER_LIMIT


@in_loop
async def test_many_large_items_are_split_into_messages_that_the_other_side_accepts() -> None:
    async with sending(message_bytes=1 << 16) as sender, receiving(message_bytes=1 << 16) as (links, _):
        link = links.dial(sender.address)
        await soon(sender.notes.ups.get())
        for number in range(4):
            link.send(withdraw(number, padding=50_000))
        assert [number_of(await soon(sender.notes.items.get())) for _ in range(4)] == [0, 1, 2, 3]


@in_loop
async def test_an_item_that_no_message_can_hold_is_refused_to_its_sender_and_the_link_lives() -> None:
    async with sending(message_bytes=1 << 16) as sender, receiving(message_bytes=1 << 16) as (links, _):
        link = links.dial(sender.address)
        with pytest.raises(OverLimit):
            link.send(withdraw(1, padding=1 << 16))
        link.send(withdraw(2))
        assert number_of(await soon(sender.notes.items.get())) == 2


@in_loop
async def test_a_node_without_certificates_dials_nobody_and_says_what_to_do() -> None:
    async with receiving(security=NoPeers()) as (links, heard):
        links.dial("127.0.0.1:7766")
        _, fault = await soon(heard.downs.get())
        assert fault.reason is Reason.FORBIDDEN
        assert "insecure_peers = true" in fault.detail


@in_loop
async def test_more_links_than_allowed_are_refused() -> None:
    async with (
        sending(most_links=1) as sender,
        receiving("one") as (one, _),
        receiving("two") as (two, heard),
    ):
        one.dial(sender.address)
        await soon(sender.notes.ups.get())
        two.dial(sender.address)
        assert (await soon(heard.downs.get()))[1].reason is Reason.OVER_LIMIT
        assert (await soon(sender.notes.refused.get())).reason is Reason.OVER_LIMIT


@in_loop
async def test_one_node_does_not_take_the_links_of_all() -> None:
    async with (
        sending(links_per_node=1) as sender,
        receiving("one") as (one, _),
        receiving("one") as (again, heard),
        receiving("two") as (two, heard_two),
    ):
        one.dial(sender.address)
        await soon(sender.notes.ups.get())
        again.dial(sender.address)
        assert (await soon(heard.downs.get()))[1].reason is Reason.OVER_LIMIT
        two.dial(sender.address)
        await soon(heard_two.ups.get())


class Sluggish:
    """The context of a stream whose hello is answered when the test likes."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.answers = 0

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> peer_pb2.LinkRequest:
        if self.answers:
            await asyncio.Event().wait()
        return peer_pb2.LinkRequest(hello=HELLO)

    async def write(self, message: peer_pb2.LinkResponse) -> None:
        await self.answered.wait()
        self.answers += 1

    async def abort(self, *args: Any, **kwargs: Any) -> None:
        raise asyncio.CancelledError


@in_loop
async def test_links_of_one_node_that_come_at_once_are_counted_too() -> None:
    notes = InNotes()
    service = PeerService(terms("sender", links_per_node=2, connect_timeout=3.0), ANYBODY, notes)
    contexts = [Sluggish() for _ in range(5)]
    streams = [asyncio.ensure_future(service.Link(None, context)) for context in contexts]
    for _ in range(3):
        assert (await soon(notes.refused.get())).reason is Reason.OVER_LIMIT
    contexts[0].answered.set()
    await soon(notes.ups.get())
    # Who does not take its answer gives its place back.
    assert (await soon(notes.refused.get())).reason is Reason.PEER_UNREACHABLE
    last = Sluggish()
    last.answered.set()
    streams.append(asyncio.ensure_future(service.Link(None, last)))
    await soon(notes.ups.get())
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    assert not list(service)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":7766",
        "host:0",
        "host:65536",
        "unix:/run/x",
        "unix:/run/x:1",
        "a b:1",
        "[::g]:1",
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_dialed(address: str) -> None:
    with pytest.raises(Invalid):
        check_address(address)


@pytest.mark.parametrize("address", ["host:1", "a.b-c:7766", "10.0.0.1:7766", "[::1]:7766"])
def test_hosts_and_addresses_of_both_families_are_accepted(address: str) -> None:
    check_address(address)


async def until_it_ends(call: Any) -> None:
    while await call.read() is not EOF:
        continue


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ([peer_pb2.LinkRequest()], grpc.StatusCode.INVALID_ARGUMENT, "begins with"),
        ([peer_pb2.LinkRequest(items=[withdraw(1)])], grpc.StatusCode.INVALID_ARGUMENT, "begins with"),
        (
            [peer_pb2.LinkRequest(hello=HELLO, items=[withdraw(1)])],
            grpc.StatusCode.INVALID_ARGUMENT,
            "nothing else",
        ),
        (
            [peer_pb2.LinkRequest(hello=changed(protocol=PROTOCOL + 1))],
            grpc.StatusCode.FAILED_PRECONDITION,
            "upgrade the older one",
        ),
        ([peer_pb2.LinkRequest(hello=changed(node=""))], grpc.StatusCode.INVALID_ARGUMENT, "hello.node"),
        (
            [peer_pb2.LinkRequest(hello=changed(node="a\x1b[2J"))],
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello.node",
        ),
        ([peer_pb2.LinkRequest(hello=changed(software="\n"))], grpc.StatusCode.INVALID_ARGUMENT, "printable"),
        ([peer_pb2.LinkRequest(hello=changed(boot=b"1"))], grpc.StatusCode.INVALID_ARGUMENT, "16 bytes"),
        ([peer_pb2.LinkRequest(hello=changed(silence_ms=1))], grpc.StatusCode.INVALID_ARGUMENT, "100 to"),
        ([peer_pb2.LinkRequest(hello=HELLO)] * 2, grpc.StatusCode.INVALID_ARGUMENT, "second hello"),
        (
            [peer_pb2.LinkRequest(hello=HELLO), peer_pb2.LinkRequest(items=[peer_pb2.ReceiverItem()])],
            grpc.StatusCode.INVALID_ARGUMENT,
            "says nothing",
        ),
        (
            [peer_pb2.LinkRequest(hello=HELLO), peer_pb2.LinkRequest(items=[withdraw(1)] * 11)],
            grpc.StatusCode.INVALID_ARGUMENT,
            "11 items",
        ),
    ],
)
@in_loop
async def test_nonsense_gets_a_status_that_says_what_was_expected_and_the_port_lives(
    messages: list[peer_pb2.LinkRequest], code: grpc.StatusCode, words: str
) -> None:
    async with sending(items_per_message=10) as sender, receiving() as (links, heard):
        async with grpc.aio.insecure_channel(sender.address) as channel:
            stub: Any = PeerServiceStub(channel)
            call = stub.Link()
            for message in messages:
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
                await soon(until_it_ends(call))
            assert refused.value.code() is code
        links.dial(sender.address)
        await soon(heard.ups.get())


@in_loop
async def test_bytes_that_are_no_protobuf_and_no_http_leave_the_port_alive() -> None:
    async with sending() as sender, receiving() as (links, heard):
        for garbage in (b"\x00" * 4096, os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", sender.port)
            writer.write(garbage)
            writer.write_eof()
            await soon(reader.read())
            writer.close()
        async with grpc.aio.insecure_channel(sender.address) as channel:
            untyped: Any = channel
            raw = untyped.stream_stream("/kvpush.v1.PeerService/Link")()
            await raw.write(b"\xff\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError):
                await soon(raw.read())
        links.dial(sender.address)
        await soon(heard.ups.get())


@in_loop
async def test_who_says_no_hello_is_turned_away_in_time() -> None:
    async with sending(connect_timeout=0.2) as sender, grpc.aio.insecure_channel(sender.address) as channel:
        stub: Any = PeerServiceStub(channel)
        call = stub.Link()
        with pytest.raises(grpc.aio.AioRpcError, match="no hello within"):
            await soon(call.read())
        assert (await soon(sender.notes.refused.get())).reason is Reason.INVALID


@in_loop
async def test_a_stopped_peer_is_noticed_by_its_silence_and_a_killed_one_at_once() -> None:
    async with child(silence=60) as (process, address):
        async with receiving(silence=0.5) as (links, heard):
            links.dial(address)
            await soon(heard.ups.get())
            process.send_signal(signal.SIGSTOP)
            _, fault = await soon(heard.downs.get())
            assert (fault.reason, fault.detail) == (
                Reason.PEER_UNREACHABLE,
                "the peer was silent for 0.5 s",
            )
            process.send_signal(signal.SIGCONT)
            links.dial(address)
            await soon(heard.ups.get())
        async with receiving(silence=60) as (links, heard):
            links.dial(address)
            await soon(heard.ups.get())
            process.kill()
            _, fault = await soon(heard.downs.get())
            assert fault.reason is Reason.PEER_UNREACHABLE
