# SPDX-License-Identifier: Apache-2.0
"""The demo from its first process to its last."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvpush_client._proto import admin_pb2
from kvpushctl.demo import certificates, engine, node
from kvpushctl.demo.account import Account, Asked, settle
from kvpushctl.demo.client import Client
from kvpushctl.demo.counters import Counters
from kvpushctl.demo.engine import Cut, Engine
from kvpushctl.demo.environment import Vllm, find_vllm, prepare, python
from kvpushctl.demo.model import Geometry
from kvpushctl.demo.node import HOST, Node
from kvpushctl.demo.processes import Processes
from kvpushctl.demo.progress import Progress
from kvpushctl.demo.prompts import OUTPUT_TOKENS, Script, script
from kvpushctl.demo.report import Leaks, Report
from kvpushctl.errors import CommandError

if TYPE_CHECKING:
    from aiohttp import ClientSession

LONG_PROMPT = 3000
_MODEL_SECONDS = 300.0
_PLAIN_SECONDS = 600.0
_SETTLE_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_POLL_SECONDS = 0.1

Found = TypeVar("Found")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

LONGEST_TMPDIR = 45
"""A socket's path has at most 107 bytes, of which the parts below this folder take 60."""


class Interrupted(CommandError):
    """Somebody pressed Ctrl-C, or sent SIGTERM; all has been cleaned up."""

    status = 130


def run(progress: Progress, *, corrupt: bool, logs: Path | None = None) -> Report:
    """Runs the demo to its end, and leaves no process and no file behind, however it ends.

    `logs` is a folder where what the processes write is kept all the same.
    Raises CommandError if something is missing or does not start, Interrupted on SIGINT and SIGTERM.
    """
    vllm = find_vllm()
    folder = _short_folder()
    try:
        return asyncio.run(
            _until_interrupted(_Demo(folder, vllm, progress, corrupt, logs or folder / "logs").run())
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> Path:
    """A new folder for temporary files, short enough for the sockets that vLLM makes in it."""
    short = len(tempfile.gettempdir()) <= LONGEST_TMPDIR
    return Path(tempfile.mkdtemp(prefix="kvpush-demo-", dir=None if short else "/tmp"))


async def _until_interrupted(demo: Coroutine[Any, Any, Report]) -> Report:
    task = asyncio.create_task(demo)
    stopped = False

    def stop() -> None:
        # Once: a second Ctrl-C must not interrupt the cleaning up.
        nonlocal stopped
        if not stopped:
            stopped = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            raise Interrupted("stopped; nothing is left behind") from None
        raise


class _Demo:
    def __init__(self, folder: Path, vllm: Vllm, progress: Progress, corrupt: bool, logs: Path) -> None:
        self._folder = folder
        self._vllm = vllm
        self._progress = progress
        self._corrupt = corrupt
        self._logs = logs
        self._cut = Cut()
        self._geometry = Geometry()
        self._model = folder / "model"

    async def run(self) -> Report:
        from aiohttp import ClientSession, ClientTimeout

        self._logs.mkdir(parents=True, exist_ok=True)
        env = prepare(self._folder, self._vllm, os.environ)
        processes = Processes(self._logs, env, str(self._folder))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop, processes)
            stack.enter_context(self._progress.shown())
            session = await stack.enter_async_context(
                ClientSession(timeout=ClientTimeout(total=_ANSWER_SECONDS))
            )
            return await self._all(processes, session)

    async def _stop(self, processes: Processes) -> None:
        with self._progress.step("stopping what was started"):
            late = await processes.stop()
        if late:
            self._progress.say(f"had to be killed: {', '.join(late)}")

    async def _all(self, processes: Processes, session: ClientSession) -> Report:
        with self._progress.step("writing a small model"):
            argv = python("-m", "kvpushctl.demo.model", str(self._model))
            await (await processes.start("model", argv)).end(_MODEL_SECONDS)
        asks = script(self._cut.block_size, self._cut.chunk, LONG_PROMPT, self._geometry.vocab)
        p, d = await self._nodes(processes)
        plain, prefill, decode = await _all_of(
            self._plain(processes, asks),
            self._engine(processes, session, "prefill", "kv_producer", p),
            self._engine(processes, session, "decode", "kv_consumer", d),
        )
        with self._progress.step("starting the router"):
            url = await engine.router(processes, session, await self._coordinates(p, prefill), decode.url)
        client = Client(session, url, decode)
        asked, objections = await self._ask(client, asks, plain)
        with self._progress.step("reading the daemons' books"):
            accounts, missing = await self._settle(asked, p, d)
            leaks = await self._leaks(client, (p, d), (prefill, decode))
        return Report(self._facts(), accounts, leaks, [*objections(accounts), *missing])

    async def _nodes(self, processes: Processes) -> tuple[Node, Node]:
        with self._progress.step("starting two kvpushd"):
            issued = certificates.issue(self._folder, ["node-p", "node-d"], HOST)
            p = await node.start(processes, self._folder, "node-p", issued["node-p"], corrupt=self._corrupt)
            d = await node.start(processes, self._folder, "node-d", issued["node-d"])
            await asyncio.gather(p.ready(), d.ready())
        return p, d

    async def _plain(self, processes: Processes, asks: Script) -> list[list[int]]:
        with self._progress.step("plain engine"):
            answer = self._folder / "plain.json"
            request = {
                "engine": engine.arguments(self._model, self._cut, self._vllm),
                "prompts": [prompt.tokens for prompt in asks.all],
                "output_tokens": OUTPUT_TOKENS,
                "answer": str(answer),
            }
            argv = python("-m", "kvpushctl.demo.plain")
            env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            child = await processes.start("plain", argv, env, stdin=json.dumps(request).encode())
            await child.end(_PLAIN_SECONDS)
            found: list[list[int]] = json.loads(answer.read_text())
            return found

    async def _engine(
        self, processes: Processes, session: ClientSession, name: str, role: str, at: Node
    ) -> Engine:
        with self._progress.step(f"{name} engine (vllm serve)"):
            started = await engine.start(
                processes, name, role, self._model, self._cut, self._vllm, at.runtime_dir
            )
            await started.ready(session)
            return started

    async def _coordinates(self, p: Node, prefill: Engine) -> str:
        """The prefill engine as the router's flag names it, so that the first request goes out at once."""
        status, registered = await p.ready(), await p.engine()
        return f"{prefill.url},engine={registered.engine_id},daemon={status.peer_address}"

    async def _ask(
        self, client: Client, asks: Script, expected: Sequence[Sequence[int]]
    ) -> tuple[list[Asked], Callable[[Sequence[Account]], list[str]]]:
        alone = len(asks.sequence)
        asked = []
        with self._progress.step(f"asking {alone} prompts, one after the other"):
            for prompt, tokens in zip(asks.sequence, expected[:alone], strict=True):
                asked.append(await client.one(prompt, tokens))
        with self._progress.step(f"asking {len(asks.together)} prompts at once"):
            together, counted = await client.together(asks.together, expected[alone:])

        def objections(accounts: Sequence[Account]) -> list[str]:
            return _disagreement(accounts[alone:], counted)

        return asked + together, objections

    async def _settle(self, asked: Sequence[Asked], p: Node, d: Node) -> tuple[list[Account], list[str]]:
        """The accounts, once both daemons say that all transfers have ended; and what they do not know."""

        async def look() -> tuple[dict[str, list[admin_pb2.Transfer]], ...] | None:
            books = await asyncio.to_thread(p.transfers), await asyncio.to_thread(d.transfers)
            halves = [one.half for book in books for transfers in book.values() for one in transfers]
            return books if all(half.phase == admin_pb2.PHASE_ENDED for half in halves) else None

        books = await _within(_SETTLE_SECONDS, look)
        missing = (
            [] if books else [f"some transfers have not ended {_SETTLE_SECONDS:g} s after the last answer"]
        )
        sent, received = books or (await asyncio.to_thread(p.transfers), await asyncio.to_thread(d.transfers))
        accounts = [
            settle(
                one,
                self._cut.block_size,
                received.get(one.transfer_id, []),
                sent.get(one.transfer_id, []),
            )
            for one in asked
        ]
        missing += [
            f"{one.about}: the router did not disaggregate it" for one in asked if not one.transfer_id
        ]
        return accounts, missing

    async def _leaks(self, client: Client, nodes: Sequence[Node], engines: Sequence[Engine]) -> Leaks:
        """What is held once nothing has to be, or when the time is over."""

        async def measure() -> Leaks:
            held = [await asyncio.to_thread(one.held) for one in nodes]
            used = [(await client.nudge(one)).kv_usage for one in engines]
            return Leaks(
                blocks=sum(each.quarantined_blocks + blocks for each, blocks in held)
                + sum(math.ceil(usage * self._cut.blocks) for usage in used),
                reservations=sum(each.reservations for each, _ in held),
                handoffs=sum(each.handoffs for each, _ in held),
            )

        async def none() -> Leaks | None:
            found = await measure()
            return None if found else found

        found = await _within(_SETTLE_SECONDS, none)
        return await measure() if found is None else found

    def _facts(self) -> dict[str, Any]:
        return {
            "vllm": self._vllm.version,
            "device": "cpu" if self._vllm.cpu else "cuda",
            "dtype": "float32",
            "layers": self._geometry.layers,
            "kv_bytes_per_token": self._geometry.kv_bytes_per_token,
            "block_size": self._cut.block_size,
            "max_num_batched_tokens": self._cut.chunk,
        }


def _disagreement(accounts: Sequence[Account], counted: Counters) -> list[str]:
    """Where the shares of the prompts asked at once do not add up to what D counted for all of them."""
    external = sum(one.external_tokens for one in accounts)
    local = sum(one.local_tokens for one in accounts)
    if (external, local) == (counted.external, counted.local):
        return []
    return [
        f"for the prompts asked at once D counted {counted.external} positions received and {counted.local} "
        f"found in its cache, but their shares add up to {external} and {local}"
    ]


async def _all_of(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], third: Coroutine[Any, Any, C]
) -> tuple[A, B, C]:
    """What the three return; the first error of one, once the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(first), group.create_task(second), group.create_task(third)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return tasks[0].result(), tasks[1].result(), tasks[2].result()


async def _within(seconds: float, look: Callable[[], Awaitable[Found | None]]) -> Found | None:
    """What `look` finds, asked again and again; None if it finds nothing in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        found = await look()
        if found is not None or loop.time() > deadline:
            return found
        await asyncio.sleep(_POLL_SECONDS)
