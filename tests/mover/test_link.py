# SPDX-License-Identifier: Apache-2.0
"""Messages and descriptors over a link."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvpushd.mover.link import Link, LinkClosed


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    near, far = (Link(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield near, far
    near.close()
    far.close()


def all_of(near: Link, far: Link, count: int) -> list[bytes]:
    messages: list[bytes] = []
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
    assert all_of(near, far, 4) == sent
    assert not near.pending
    assert far.receive() == []


def test_each_descriptor_comes_with_its_message_behind_a_full_socket(ends: tuple[Link, Link]) -> None:
    near, far = ends
    pipes = [os.pipe() for _ in range(3)]
    near.send(bytes(4 << 20))
    for _, write in pipes:
        near.send(b"pipe", write)
        os.close(write)
    assert all_of(near, far, 4)[1:] == [b"pipe"] * 3
    for number, (read, _) in enumerate(pipes):
        taken = far.take_descriptor()
        assert taken is not None
        os.write(taken, bytes([number]))
        os.close(taken)
        assert os.read(read, 10) == bytes([number])
        os.close(read)
    assert far.take_descriptor() is None


def test_what_was_sent_before_the_end_is_heard_before_it(ends: tuple[Link, Link]) -> None:
    near, far = ends
    near.send(b"last words")
    near.close()
    assert far.receive() == [b"last words"]
    with pytest.raises(LinkClosed):
        far.receive()
    with pytest.raises(LinkClosed):
        far.send(b"anyone?")


def test_closing_lets_go_of_descriptors_that_were_not_sent_or_not_taken(ends: tuple[Link, Link]) -> None:
    near, far = ends
    read, write = os.pipe()
    near.send(b"taken by nobody", write)
    far.receive()
    near.send(bytes(4 << 20))
    near.send(b"never sent", write)
    os.close(write)
    near.close()
    far.close()
    assert os.read(read, 1) == b""
    os.close(read)
