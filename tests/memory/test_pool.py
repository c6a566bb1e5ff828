# SPDX-License-Identifier: Apache-2.0
"""The memory that an engine shares."""

from __future__ import annotations

import fcntl
import os

import pytest

from kvpush_client.pool import SEALS, Pool

SIZE = 3 << 20


@pytest.mark.parametrize("huge_pages", [False, True])
def test_a_pool_is_sealed_zeroed_and_as_long_as_asked(huge_pages: bool) -> None:
    pool = Pool.create(SIZE, "kv", huge_pages=huge_pages)
    assert fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) == SEALS
    assert (pool.nbytes, os.fstat(pool.fd).st_size, len(pool.view)) == (SIZE, SIZE, SIZE)
    assert bytes(pool.view) == bytes(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, SIZE // 2)
    pool.close()


def test_prefault_brings_in_every_page_and_keeps_the_bytes() -> None:
    pool = Pool.create(SIZE, "kv")
    pool.view[:5] = b"bytes"
    assert os.fstat(pool.fd).st_blocks * 512 < SIZE
    pool.prefault()
    assert os.fstat(pool.fd).st_blocks * 512 == SIZE
    assert bytes(pool.view[:5]) == b"bytes"
    pool.close()


def test_a_view_in_use_outlives_close() -> None:
    pool = Pool.create(SIZE, "kv")
    held = pool.view[10:20]
    pool.close()
    pool.close()
    held[:] = b"0123456789"
    assert bytes(held) == b"0123456789"


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_pool_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Pool.create(nbytes, "kv")
