# SPDX-License-Identifier: Apache-2.0
"""Messages and descriptors over a link."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpushd.mover.link import Letter, Link, LinkClosed


@contextmanager
def linked(
    near: type[socket.socket] = socket.socket, far: type[socket.socket] = socket.socket
) -> Iterator[tuple[Link, Link]]:
    """Two ends, over sockets of these kinds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    links = Link(near(fileno=ours.detach())), Link(far(fileno=theirs.detach()))
    try:
        yield links
    finally:
        for link in links:
            link.close()


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    with linked() as links:
        yield links


def all_of(near: Link, far: Link, count: int) -> list[Letter]:
    messages: list[Letter] = []
    while len(messages) < count:
        near.flush()
        messages += far.receive()
    return messages


def test_messages_come_whole_and_in_order_however_large(ends: tuple[Link, Link]) -> None:
    near, far = ends
    sent = [b"small", bytes(8 << 20), b"", b"last"]
    for message in sent:
        near.send(message)
    assert near.pending
    assert all_of(near, far, 4) == [(message, None) for message in sent]
    assert not near.pending
    assert far.receive() == []


def test_each_descriptor_comes_with_its_message_behind_a_full_socket(ends: tuple[Link, Link]) -> None:
    near, far = ends
    pipes = [os.pipe() for _ in range(3)]
    near.send(bytes(4 << 20))
    for _, write in pipes:
        near.send(b"pipe", write)
        os.close(write)
    (first, nothing), *letters = all_of(near, far, 4)
    assert (len(first), nothing) == (4 << 20, None)
    for (message, descriptor), (read, _) in zip(letters, pipes, strict=True):
        assert message == b"pipe"
        assert leads_to(descriptor, read)


def test_a_message_whose_descriptor_was_lost_gets_no_other_ones() -> None:
    (read, write), (other_read, other_write) = os.pipe(), os.pipe()
    with linked(far=Cramped) as (near, far):
        near.send(b"lost", write)
        near.send(b"bare")
        near.send(b"whole", other_write)
        *others, (message, descriptor) = all_of(near, far, 3)
    assert others == [(b"lost", None), (b"bare", None)]
    assert message == b"whole"
    for end in (write, other_write):
        os.close(end)
    assert leads_to(descriptor, other_read)
    assert os.read(read, 1) == b"", "the kernel has closed it"
    os.close(read)


class Cramped(socket.socket):
    """One whose process has no room for the first descriptor that comes."""

    room = False

    def recvmsg(self, size: int, ancillary: int = 0, flags: int = 0) -> Any:
        came = super().recvmsg(size, ancillary if self.room else 0, flags)
        self.room = self.room or bool(came[2] & socket.MSG_CTRUNC)
        return came


def test_who_has_no_room_for_a_copy_sends_the_message_without(ends: tuple[Link, Link]) -> None:
    near, far = ends
    read, write = os.pipe()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        near.send(b"without", write)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    near.send(b"with", write)
    os.close(write)
    without, (message, descriptor) = all_of(near, far, 2)
    assert without == (b"without", None)
    assert message == b"with"
    assert leads_to(descriptor, read)


def test_who_has_too_many_descriptors_under_way_sends_the_message_without() -> None:
    read, write = os.pipe()
    with linked(near=Crowded) as (near, far):
        near.send(b"without", write)
        near.send(b"with", write)
        os.close(write)
        without, (message, descriptor) = all_of(near, far, 2)
    assert without == (b"without", None)
    assert message == b"with"
    assert leads_to(descriptor, read)


class Crowded(socket.socket):
    """One whose user has as many descriptors under way as it may, until it has tried once."""

    tried = False

    def sendmsg(self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None) -> int:
        if ancillary and not self.tried:
            self.tried = True
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return super().sendmsg(buffers, ancillary, flags)


def leads_to(descriptor: int | None, read: int) -> bool:
    """Whether a descriptor is the other end of a pipe, of which there is no third. Closes both."""
    assert descriptor is not None
    os.write(descriptor, b"!")
    os.close(descriptor)
    came = os.read(read, 2), os.read(read, 1)
    os.close(read)
    return came == (b"!", b"")


def test_what_was_sent_before_the_end_is_heard_before_it(ends: tuple[Link, Link]) -> None:
    near, far = ends
    near.send(b"last words")
    near.close()
    assert far.receive() == [(b"last words", None)]
    with pytest.raises(LinkClosed):
        far.receive()
    with pytest.raises(LinkClosed):
        far.send(b"anyone?")


def test_closing_lets_go_of_descriptors_that_were_not_sent_or_whose_message_is_not_whole(
    ends: tuple[Link, Link],
) -> None:
    near, far = ends
    read, write = os.pipe()
    near.send(bytes(4 << 20), write)
    assert far.receive() == []
    near.send(b"never sent", write)
    os.close(write)
    near.close()
    far.close()
    assert os.read(read, 1) == b""
    os.close(read)
