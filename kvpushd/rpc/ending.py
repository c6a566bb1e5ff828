# SPDX-License-Identifier: Apache-2.0
"""Why the other side ended a stream, also where a write fails as the stream ends.

grpc.aio puts a status of its own in the place of the one that came, when it sees a failed write after it
(grpc/grpc#36066), and raises InvalidStateError for a write that begins after the end. Either way what the
other side said would be lost: that it refuses, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import grpc
import grpc.aio

# Seconds between a write that failed and the status that explains it, which is on its way by then. No more:
# until the end is said, whoever dials that address gets the link that is over.
PATIENCE = 0.05
_COVER = (grpc.StatusCode.INTERNAL, "Internal error from Core")


class Ending:
    """How one stream that this node began ended; made before its first write."""

    def __init__(self, call: Any) -> None:
        self._said: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    async def __aenter__(self) -> None:
        """Around all reads and writes of the stream."""

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises the other side's status in place of what hides it."""
        if isinstance(error, grpc.aio.AioRpcError):
            hidden = _is_cover(error)
        else:
            hidden = isinstance(error, asyncio.InvalidStateError)
        if hidden:
            await asyncio.wait((self._said,), timeout=PATIENCE)
            if self._said.done():
                raise self._said.result() from error

    def _note(self, call: Any) -> None:
        """Called at each status, the cover too, while it is the call's; what is over answers at once."""
        answer: Generator[Any, None, grpc.aio.AioRpcError] = _status(call).__await__()
        try:
            next(answer)
        except StopIteration as done:
            if not _is_cover(done.value) and not self._said.done():
                self._said.set_result(done.value)
        else:
            answer.close()


def _is_cover(error: grpc.aio.AioRpcError) -> bool:
    return (error.code(), error.details()) == _COVER


async def _status(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(),
        grpc.aio.Metadata(),
        await call.trailing_metadata(),
        await call.details() or "the peer closed the link",
        await call.debug_error_string(),
    )
