# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine as a test sees it: requests in, outputs, statistics and its end out.

Methods may be called from any thread. `harness` makes engines.
"""

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from testing.clockwork.clock import Clock, Verify
from testing.clockwork.messages import (
    Abort,
    Answer,
    Arm,
    Ask,
    AskStats,
    Command,
    Configure,
    EngineSpec,
    Exit,
    Inspect,
    Progress,
    Ready,
    ResetPrefixCache,
    Stats,
    Submit,
)
from testing.clockwork.witness import Flip

T = TypeVar("T")

EXIT_S = 10.0
"""How long a process may take to end before it is killed."""


class EngineFailed(RuntimeError):
    """An engine ended, or did not start. The message carries how, and the end of its log."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a request gave. Times are CLOCK_MONOTONIC in seconds, the same in all processes.

    t_first is None if it got no token. finish_reason is vLLM's: "length", "abort", "error", ...
    The cached counts say how many prompt tokens came from the prefix cache and from a connector.
    """

    token_ids: list[int]
    finish_reason: str
    kv_transfer_params: dict[str, Any] | None
    t_submitted: float
    t_first: float | None
    t_last: float
    local_cached_tokens: int | None
    external_cached_tokens: int | None

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token. Raises ValueError if there was none."""
        if self.t_first is None:
            raise ValueError("the request got no token")
        return self.t_first - self.t_submitted


class Request:
    """A request in flight."""

    def __init__(self, engine: "Engine", request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._submitted = time.monotonic()
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._cached: tuple[int | None, int | None] = (None, None)
        self._first: Future[float] = Future()
        self._done: Future[Output] = Future()

    def result(self, timeout: float) -> Output:
        """What it gave, once it has ended.

        Raises TimeoutError, or EngineFailed as soon as the engine is gone.
        """
        return self._engine._await(self._done, timeout, f"request {self.request_id}")

    def first_token(self, timeout: float) -> float:
        """When its first token came, once it has. Raises as `result`, and ValueError if it ended before."""
        return self._engine._await(self._first, timeout, f"the first token of {self.request_id}")

    def done(self) -> bool:
        """Whether it has ended, or its engine has."""
        return self._done.done()

    @property
    def tokens_so_far(self) -> list[int]:
        """The tokens that have come."""
        return list(self._tokens)

    @property
    def times_so_far(self) -> list[float]:
        """When each of them came; CLOCK_MONOTONIC in seconds."""
        return list(self._times)

    def _progress(self, progress: Progress) -> None:
        if progress.local_cached_tokens is not None:
            self._cached = (progress.local_cached_tokens, progress.external_cached_tokens)
        self._tokens.extend(progress.token_ids)
        self._times.extend([progress.time] * len(progress.token_ids))
        if progress.token_ids and not self._first.done():
            self._first.set_result(progress.time)
        if progress.finish_reason is None:
            return
        first = self._first.result() if self._first.done() else None
        if first is None:
            self._first.set_exception(ValueError(f"{self.request_id} ended without a token"))
        self._done.set_result(
            Output(
                token_ids=list(self._tokens),
                finish_reason=progress.finish_reason,
                kv_transfer_params=progress.kv_transfer_params,
                t_submitted=self._submitted,
                t_first=first,
                t_last=progress.time,
                local_cached_tokens=self._cached[0],
                external_cached_tokens=self._cached[1],
            )
        )

    def _fail(self, error: EngineFailed) -> None:
        for future in (self._first, self._done):
            if not future.done():
                future.set_exception(error)


class Engine:
    """One vLLM engine in a process of its own. Use it as a context; made by `Harness.engine`."""

    def __init__(self, spec: EngineSpec, connection: Connection, life: socket.socket) -> None:
        self.name = spec.name
        self.log = Path(spec.log)
        self._connection = connection
        self._max_model_len: int = spec.arguments["max_model_len"]
        self._life = life
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._requests: dict[str, Request] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._born: Future[int] = Future()
        self._ready: Future[Ready] = Future()
        self._failure: EngineFailed | None = None
        self._closing = False
        self._reader = threading.Thread(target=self._read, name=f"engine-{self.name}", daemon=True)
        self._reader.start()

    def ready(self, timeout: float) -> float:
        """Wait until it is up; the seconds that it took. Raises EngineFailed or TimeoutError."""
        return self._await(self._ready, timeout, "start").seconds

    @property
    def blocks(self) -> int:
        """KV blocks of a started engine, the null block included."""
        return self._ready.result(0).blocks

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Run a prompt and return at once. `params` are kv_transfer_params.

        Raises ValueError if a request of that id is in flight or the prompt does not fit the model, and
        EngineFailed if the engine is gone.
        """
        if not 0 < len(prompt) < self._max_model_len or max_tokens < 1:
            raise ValueError(
                f"{len(prompt)} tokens to prompt and {max_tokens} to give: a prompt has 1 to "
                f"{self._max_model_len - 1}, an answer at least 1"
            )
        request = Request(self, request_id or uuid.uuid4().hex)
        with self._lock:
            if request.request_id in self._requests:
                raise ValueError(f"request {request.request_id} is in flight on engine {self.name}")
            self._requests[request.request_id] = request
            kv_transfer_params = None if params is None else dict(params)
            self._send(Submit(request.request_id, tuple(prompt), max_tokens, kv_transfer_params))
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request, which then ends with finish_reason "abort"; nothing if it has ended."""
        with self._lock:
            self._send(Abort(request_id))

    def stats(self, timeout: float = 30.0) -> Stats:
        """The engine between two steps."""
        stats: Stats = self._ask(AskStats(), timeout)
        return stats

    def idle(self, timeout: float = 30.0) -> Stats:
        """The engine as soon as it has nothing left to do: no request, nothing that a connector holds up."""
        stats: Stats = self._ask(AskStats(when_idle=True), timeout)
        return stats

    def set_clock(self, clock: Clock, timeout: float = 30.0) -> None:
        """Change the pretended times from the next step on."""
        self._ask(Configure(clock=clock), timeout)

    def set_verify(self, verify: Verify, timeout: float = 30.0) -> None:
        """Change what is checked from the next step on."""
        self._ask(Configure(verify=verify), timeout)

    def corrupt(self, layer: int, head: int, position: int, byte: int, timeout: float = 30.0) -> None:
        """Flip one byte of a cell, before the first step that reads that position of any request.

        `head` is a global KV head; a cell is its key, then its value. `Stats.witness.flips` says whether it
        has happened.
        """
        self._ask(Arm(Flip(layer, head, position, byte)), timeout)

    def reset_prefix_cache(self, timeout: float = 30.0) -> bool:
        """Forget cached prefixes; False if blocks are in use."""
        return bool(self._ask(ResetPrefixCache(), timeout))

    def inspect(self, function: str, *arguments: Any, timeout: float = 30.0) -> Any:
        """Call "module:function" in the engine's process, between two steps, with vLLM's EngineCore.

        Raises RuntimeError with the function's own error.
        """
        return self._ask(Inspect(function, arguments), timeout)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the engine's process. Raises EngineFailed if it has ended."""
        process = self._await(self._born, 60.0, "birth")
        with self._lock:  # its descriptor is closed under the lock, and may then be another's
            if self._failure is not None:
                raise self._failure
            signal.pidfd_send_signal(process, signum)

    def ended(self, timeout: float) -> str:
        """How the engine ended, once it has. Raises TimeoutError."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise TimeoutError(f"engine {self.name} still runs after {timeout:g} s")
        return str(self._failure)

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of its log, long ones cut."""
        if not self.log.exists():
            return ""
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Shut it down, by SIGKILL if it does not within ten seconds. Idempotent."""
        with self._lock:
            self._closing = True
            if self._failure is None:
                self._send(Exit())
                if self._born.done():  # a test may have stopped it, and then it would not hear us
                    signal.pidfd_send_signal(self._born.result(), signal.SIGCONT)
        self._reader.join(EXIT_S)
        if self._reader.is_alive():
            with contextlib.suppress(EngineFailed):  # it may end just now
                self.kill(signal.SIGKILL)
            self._reader.join()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: Command | Ask) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._connection.send(message)
        except OSError:
            # The reader is about to say why, to everyone who waits.
            return

    def _ask(self, command: Command, timeout: float) -> Any:
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            self._answers[number] = future
            self._send(Ask(number, command))
        return self._await(future, timeout, type(command).__name__)

    def _await(self, future: "Future[T]", timeout: float, what: str) -> T:
        try:
            return future.result(timeout)
        except FutureTimeout:
            if future.done():
                raise
            raise TimeoutError(
                f"engine {self.name}: {what} took more than {timeout:g} s; its log ends:\n{self.log_tail()}"
            ) from None

    def _read(self) -> None:
        ending = "its nursery ended"
        connection_open = True
        while True:
            sources: list[Any] = [self._life] + ([self._connection] if connection_open else [])
            ready = wait(sources)
            # What it still said comes first, its end last.
            if self._connection in ready:
                try:
                    self._dispatch(self._connection.recv())
                except (EOFError, OSError):
                    connection_open = False
                continue
            message, descriptors, _, _ = socket.recv_fds(self._life, 64, 1)
            if descriptors:
                self._born.set_result(descriptors[0])
                continue
            if message:
                status = os.waitstatus_to_exitcode(int(message))
                ending = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            break
        self._end(ending)

    def _dispatch(self, report: Ready | Answer | Progress) -> None:
        match report:
            case Ready():
                self._ready.set_result(report)
            case Answer(number, value, error):
                with self._lock:
                    future = self._answers.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(RuntimeError(f"engine {self.name}: {error}"))
            case Progress(request_id=request_id, finish_reason=finish):
                with self._lock:
                    request = self._requests[request_id]
                    if finish is not None:
                        del self._requests[request_id]
                request._progress(report)

    def _end(self, ending: str) -> None:
        self._life.close()
        tail = "" if self._closing else f"; its log ends:\n{self.log_tail()}"
        error = EngineFailed(f"engine {self.name} ended: {ending}{tail}")
        with self._lock:
            self._failure = error
            if self._born.done():
                os.close(self._born.result())
            requests, self._requests = list(self._requests.values()), {}
            answers, self._answers = list(self._answers.values()), {}
        futures: list[Future[Any]] = [self._born, self._ready, *answers]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        for request in requests:
            request._fail(error)
