# SPDX-License-Identifier: Apache-2.0
"""Which descriptors are accepted as a pool, and which are not."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from kvpush_client.pool import SEALS, Pool
from kvpushd.errors import BadMemory
from kvpushd.memory.host import accept, map_memory

SIZE = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool.create(SIZE, "test")
    yield made
    made.close()


def memfd(*, size: int = SIZE, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def refusal(fd: int, nbytes: int = SIZE, uid: int | None = None) -> str:
    with pytest.raises(BadMemory) as caught:
        accept(fd, nbytes, os.getuid() if uid is None else uid)
    os.close(fd)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pool_is_accepted(pool: Pool) -> None:
    accept(pool.fd, SIZE, os.getuid())


@pytest.mark.parametrize("name", ["F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"])
def test_a_memfd_that_lacks_a_seal_is_refused_and_the_seal_named(name: str) -> None:
    assert name in refusal(memfd(seals=SEALS & ~getattr(fcntl, name)))


def test_a_memfd_shorter_than_the_pool_is_refused_with_both_sizes() -> None:
    assert "1,048,575 bytes, but the pool was offered as 1,048,576" in refusal(memfd(size=SIZE - 1))


def test_a_pool_of_no_bytes_is_refused() -> None:
    assert "offered as 0" in refusal(memfd(), nbytes=0)


def test_a_read_only_descriptor_is_refused() -> None:
    sealed = memfd()
    read_only = os.open(f"/proc/self/fd/{sealed}", os.O_RDONLY)
    os.close(sealed)
    assert "can't be written to" in refusal(read_only)


def test_a_memfd_sealed_against_writing_is_refused() -> None:
    assert "can't be written to" in refusal(memfd(seals=SEALS | fcntl.F_SEAL_WRITE))


def test_another_users_memfd_is_refused_and_both_users_named() -> None:
    other = os.getuid() + 1
    assert f"belongs to user {os.getuid()}, but the engine runs as user {other}" in refusal(
        memfd(), uid=other
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a memfd away")
def test_a_memfd_given_away_is_refused() -> None:
    given = memfd()
    os.fchown(given, 12345, -1)
    assert "belongs to user 12345" in refusal(given)


def test_a_file_on_disk_is_refused() -> None:
    with tempfile.TemporaryFile(dir=os.getcwd()) as file:
        file.truncate(SIZE)
        assert "expected a memfd" in refusal(os.dup(file.fileno()))


def test_what_is_no_file_is_refused_by_its_kind() -> None:
    read, write = os.pipe()
    os.close(write)
    assert "is a pipe" in refusal(read)
    near, far = socket.socketpair()
    far.close()
    assert "is a socket" in refusal(near.detach())


def test_a_mapping_and_the_pool_are_the_same_bytes(pool: Pool) -> None:
    mapping = map_memory(pool.fd, SIZE)
    with mapping.view as view:
        view[100] = 7
    pool.view[101] = 8
    with mapping.view as view:
        assert bytes(pool.view[100:102]) == bytes(view[100:102]) == b"\x07\x08"
    mapping.close()


def test_filling_in_page_tables_keeps_the_bytes(pool: Pool) -> None:
    pool.view[:3] = b"abc"
    mapping = map_memory(pool.fd, SIZE)
    assert mapping.populate(0, SIZE * 2)
    assert bytes(pool.view[:3]) == b"abc"
    mapping.close()


def test_more_than_the_descriptor_holds_can_not_be_mapped(pool: Pool) -> None:
    with pytest.raises(BadMemory, match="can't be mapped"):
        map_memory(pool.fd, SIZE * 2)
