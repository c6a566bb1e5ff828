# SPDX-License-Identifier: Apache-2.0
"""The KV cache comes out of a pool, and nothing else does."""

import os
from types import SimpleNamespace

import pytest
import torch

from kvpush_client.vllm.memory import AllocationError, PoolAllocation, allocation_bytes, refuse_device

SIZE = 1 << 16


def test_the_cache_and_the_pools_descriptor_are_the_same_bytes():
    with PoolAllocation(SIZE, "test") as allocation:
        cache = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    assert not cache.any()
    cache[1234] = 7
    assert os.pread(allocation.pool.fd, 1, 1234) == b"\7"
    os.pwrite(allocation.pool.fd, b"\5", 4321)
    assert cache[4321] == 5
    del cache
    allocation.pool.close()


def test_other_tensors_are_left_alone():
    with PoolAllocation(SIZE, "test") as allocation:
        others = [
            torch.zeros(SIZE, dtype=torch.uint8),
            torch.zeros(SIZE - 1, dtype=torch.int8),
            torch.ones(SIZE, dtype=torch.int8),
            torch.zeros(SIZE, dtype=torch.int8, device="meta"),
        ]
        assert allocation.pool is None
        torch.zeros(SIZE, dtype=torch.int8)
    assert [len(other) for other in others] == [SIZE, SIZE - 1, SIZE, SIZE]
    allocation.pool.close()


def test_a_cache_that_was_allocated_otherwise_is_an_error():
    with pytest.raises(AllocationError, match="65,536 bytes"), PoolAllocation(SIZE, "test"):
        torch.zeros(SIZE * 2, dtype=torch.int8)


def test_a_second_cache_is_an_error():
    with PoolAllocation(SIZE, "test") as allocation:
        torch.zeros(SIZE, dtype=torch.int8)
        with pytest.raises(AllocationError, match="second"):
            torch.zeros(SIZE, dtype=torch.int8)
    allocation.pool.close()


def test_an_error_inside_is_not_hidden():
    with pytest.raises(ZeroDivisionError), PoolAllocation(SIZE, "test"):
        raise ZeroDivisionError


def test_the_tensors_must_share_one_buffer():
    tensors = [SimpleNamespace(size=1), SimpleNamespace(size=2)]
    with pytest.raises(AllocationError, match="one buffer"):
        allocation_bytes(SimpleNamespace(kv_cache_tensors=tensors))
    assert allocation_bytes(SimpleNamespace(kv_cache_tensors=tensors[:1])) == 1


def test_devices_that_are_not_supported_are_refused_with_what_is_missing():
    refuse_device("cpu")
    with pytest.raises(AllocationError, match=r"cuda.*missing"):
        refuse_device("cuda")
