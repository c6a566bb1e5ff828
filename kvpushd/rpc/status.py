# SPDX-License-Identifier: Apache-2.0
"""Reasons as gRPC statuses, both ways.

The code is for generic tools; the reason itself travels beside it, so that nothing is lost on the way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpush_client.events import Fault, Reason
from kvpushd.errors import Invalid, KvpushError, OverLimit

# Trailing metadata: the name of the reason.
REASON_KEY = "kvpush-reason"

CODES = {
    Reason.UNSPECIFIED: grpc.StatusCode.INTERNAL,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.PEER_CANCELLED: grpc.StatusCode.ABORTED,
    Reason.EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.PEER_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_SUCH_ENGINE: grpc.StatusCode.NOT_FOUND,
    Reason.ENGINE_GONE: grpc.StatusCode.ABORTED,
    Reason.STALE_INCARNATION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.FINGERPRINT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PROMPT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    Reason.STALE_ATTEMPT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.POSITIONS_MISSING: grpc.StatusCode.ABORTED,
    Reason.TRANSPORT_FAILED: grpc.StatusCode.ABORTED,
    Reason.CORRUPTED: grpc.StatusCode.DATA_LOSS,
    Reason.MOVER_DIED: grpc.StatusCode.ABORTED,
    Reason.OVER_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NOT_WANTED: grpc.StatusCode.ABORTED,
    Reason.FENCED: grpc.StatusCode.ABORTED,
    Reason.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.BAD_MEMORY: grpc.StatusCode.FAILED_PRECONDITION,
}
# Statuses that gRPC itself, or a program that names no reason, makes.
REASONS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.OVER_LIMIT,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID,
    grpc.StatusCode.PERMISSION_DENIED: Reason.FORBIDDEN,
    grpc.StatusCode.UNAUTHENTICATED: Reason.FORBIDDEN,
    grpc.StatusCode.UNIMPLEMENTED: Reason.UNSUPPORTED,
}


async def abort(context: Any, error: KvpushError) -> NoReturn:
    """Ends a call with the error's status. Never returns: raises what gRPC expects of a handler."""
    await context.abort(CODES[error.reason], str(error), ((REASON_KEY, error.reason.name),))
    raise AssertionError("abort returned")


async def read(context: Any) -> Any:
    """The next message of a stream, or gRPC's EOF.

    Raises Invalid where the bytes are no message, OverLimit where there is no memory for one.
    """
    try:
        return await context.read()
    except (DecodeError, MemoryError) as error:
        raise _unreadable(error) from None


def _unreadable(error: DecodeError | MemoryError) -> KvpushError:
    """What is wrong with bytes that can't be decoded. For protobuf it is all one, but for its words."""
    if isinstance(error, MemoryError) or "alloc failed" in str(error):
        return OverLimit("the daemon has no memory for the message")
    return Invalid(f"the bytes are no message: {error}")


async def answered(call: Any) -> Any:
    """The next message of a stream that this node began, or gRPC's EOF. Raises Invalid where the bytes are no
    message, for which gRPC has None on this side."""
    message = await call.read()
    if message is None:
        raise Invalid("the bytes are no message")
    return message


class Decoding(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers bytes that are no message as any other wrong message, in methods that take one message.

    gRPC decodes before the method is called, and its own answer names no reason.
    """

    def __init__(self, rejected: Callable[[KvpushError], None]) -> None:
        """`rejected` hears of each call that was refused."""
        self._rejected = rejected

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method, or one that refuses what can't be decoded."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler

        def decode(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except (DecodeError, MemoryError) as error:
                return _unreadable(error)

        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, KvpushError):
                self._rejected(request)
                await abort(context, request)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(answer, decode, handler.response_serializer)


def fault_of(error: grpc.aio.AioRpcError) -> Fault:
    """What a call that failed says; UNAVAILABLE and all that names no reason is PEER_UNREACHABLE."""
    metadata: Any = error.trailing_metadata() or ()
    name = next((str(value) for key, value in metadata if key == REASON_KEY), "")
    detail = error.details() or error.code().name
    if name in Reason.__members__:
        return Fault(Reason[name], detail)
    return Fault(REASONS.get(error.code(), Reason.PEER_UNREACHABLE), detail)
