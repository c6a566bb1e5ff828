# SPDX-License-Identifier: Apache-2.0
"""The engine's KV cache in memory that the daemon can map: its allocation is answered, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvpush_client.pool import Pool


class AllocationError(RuntimeError):
    """vLLM allocated its KV cache in a way that this connector does not know."""


class PoolAllocation(TorchFunctionMode):  # type: ignore[misc]
    """A context in which the KV cache, `nbytes` of int8 zeros on the CPU, comes out of a new pool.

    vLLM allocates the cache of all layers as one tensor inside `get_mem_pool_context()`. Whatever else is
    allocated within is left alone. Leaving the context without that allocation raises AllocationError.
    """

    def __init__(self, nbytes: int, name: str) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._name = name
        self.pool: Pool | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer the one allocation; pass on all else."""
        kwargs = dict(kwargs or {})
        if func is torch.zeros and self._is_cache(args, kwargs):
            if self.pool is not None:
                raise AllocationError(
                    f"vLLM allocated a second KV cache of {self._nbytes:,} bytes; one was expected"
                )
            # A memfd is born as zeros.
            self.pool = Pool.create(self._nbytes, self._name)
            return torch.frombuffer(self.pool.view, dtype=torch.int8)
        return func(*args, **kwargs)

    def _is_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        size = args[0] if len(args) == 1 else kwargs.get("size")
        if kwargs.get("dtype") is not torch.int8 or size not in (self._nbytes, (self._nbytes,)):
            return False
        return bool(torch.device(kwargs.get("device") or "cpu").type == "cpu")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See the class."""
        super().__exit__(kind, error, trace)
        if error is None and self.pool is None:
            raise AllocationError(
                f"vLLM did not allocate its KV cache as one buffer of {self._nbytes:,} bytes inside "
                "get_mem_pool_context(): this version of vLLM is not supported"
            )


def allocation_bytes(kv_cache_config: Any) -> int:
    """Size of the one buffer that all KV cache tensors share. Raises AllocationError if they don't."""
    sizes = {int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) != 1:
        raise AllocationError(f"the KV cache has buffers of {sorted(sizes)} bytes; one buffer was expected")
    return sizes.pop()


def refuse_device(device_type: str) -> None:
    """Raises AllocationError on any device but the CPU, naming what is missing."""
    if device_type != "cpu":
        raise AllocationError(
            f"KvpushConnector of this build keeps the KV cache in host memory only, and this engine's is on "
            f"{device_type}: what is missing is a pool in device memory (VMM export, IPC import, or staging) "
            "and hand-offs that wait for a stream's event. Use NixlPushConnector on this engine"
        )
