# SPDX-License-Identifier: Apache-2.0
"""Two namespaces on one machine: what reaches whom, and at what rate."""

import contextlib
import os
import socket
import subprocess
import sys
from multiprocessing import get_context

import pytest

from testing import netns

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making a network namespace needs root"),
]


@pytest.fixture
def link():
    """Two namespaces and the cable between them."""
    with netns.Link(f"kvtest{os.getpid()}", subnet="10.231.79") as made:
        yield made


def _serve(namespace, answers):
    netns.enter(namespace)
    with socket.create_server(("0.0.0.0", 0)) as server:
        answers.send((server.getsockname()[1], sorted(os.listdir("/sys/class/net"))))
        with server.accept()[0] as connection:
            connection.sendall(b"hello")


def _ask(namespace, host, port):
    code = f"import socket; print(socket.create_connection(({host!r}, {port}), 5).recv(9))"
    command = [*netns.prefix(namespace), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_process_that_enters_sees_only_its_own_devices_and_is_reached_over_the_link(link):
    answers, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=_serve, args=(link.names[0], theirs))
    server.start()
    try:
        assert answers.poll(30)
        port, devices = answers.recv()
        assert devices == ["kvp0", "lo"]
        assert "hello" in _ask(link.names[1], link.hosts[0], port).stdout
    finally:
        server.kill()
        server.join()


def test_a_shaped_link_says_its_rate_until_it_is_free_again(link):
    def discipline():
        command = ["tc", "-n", link.names[0], "qdisc", "show", "dev", link.devices[0]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    link.shape(125_000_000)
    assert "tbf" in discipline()
    assert "rate 1Gbit" in discipline()
    link.shape(None)
    assert "tbf" not in discipline()


def _count(namespace, told, sent):
    netns.enter(namespace)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
        end.bind(("0.0.0.0", 0))
        told.send(end.getsockname()[1])
        end.sendto(b"here", end.recvfrom(9)[1])
        end.settimeout(5)
        came = 0
        with contextlib.suppress(TimeoutError):
            while came < sent:
                end.recv(PACKET)
                came += 1
        told.send(came)


SO_RCVBUFFORCE = 33
PACKET = 1400
FLOOD = """
import socket, sys
host, port, count, size = sys.argv[1], *map(int, sys.argv[2:])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    end.setsockopt(socket.SOL_SOCKET, 32, 8 << 20)  # SO_SNDBUFFORCE
    end.connect((host, port))
    end.send(b"there?")
    end.recv(9)
    for _ in range(count):
        end.send(bytes(size))
"""


def test_what_is_queued_on_a_slow_link_is_not_lost_where_it_becomes_fast_again(link):
    count = 120  # more than the burst, less than burst and queue
    told, theirs = get_context("spawn").Pipe()
    receiver = get_context("spawn").Process(target=_count, args=(link.names[1], theirs, count))
    receiver.start()
    try:
        assert told.poll(30)
        where = [link.hosts[1], str(told.recv()), str(count), str(PACKET)]
        link.shape(20_000)
        command = [*netns.prefix(link.names[0]), sys.executable, "-c", FLOOD, *where]
        subprocess.run(command, check=True, timeout=30)
        link.shape(None)
        assert told.poll(30)
        assert told.recv() == count
    finally:
        receiver.kill()
        receiver.join()


def test_nothing_remains_of_a_link_that_was_closed():
    with netns.Link(f"kvtest{os.getpid()}", subnet="10.231.79") as link:
        assert all(os.path.exists(f"/run/netns/{name}") for name in link.names)
    assert not any(os.path.exists(f"/run/netns/{name}") for name in link.names)


def test_no_namespace_of_that_name_can_be_entered():
    with pytest.raises(FileNotFoundError):
        netns.enter("kvtest-none")
