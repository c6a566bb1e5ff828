# SPDX-License-Identifier: Apache-2.0
"""The dispatch of one request: which engines, which leg when, and what if one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

from aiohttp import ClientError, ClientSession
from multidict import CIMultiDict

from kvpush_router.answer import Answer
from kvpush_router.coordinates import Coordinates
from kvpush_router.engine import Engine, Fleet
from kvpush_router.journal import Entry
from kvpush_router.legs import Body, decode_leg, prefill_leg, why_alone
from kvpush_router.ranks import RANK_HEADER, Rank, is_refusal

PrefillLeg: TypeAlias = asyncio.Task[Mapping[str, Any]]
"""Returns the kv_transfer_params that the prefill engine returned, perhaps none."""


class NoEngine(Exception):
    """No decode engine answered; says which were asked and what happened."""


class PrefillFailed(Exception):
    """The prefill leg brought no KV; says why."""


class _NoSuchRank(PrefillFailed):
    """The prefill server has no engine of the number that it was asked for."""


class Dispatch:
    """Both legs of one request. Use as a context: leaving it ends what still runs.

    `open` returns the decode engine's answer. A failed prefill leg is no error: as long as the decode
    engine has not begun to answer, its leg is sent again without a remote prefill, since the first would
    wait for the KV until its lease runs out. So it is, with what the prefill engine returned, where another
    engine prefilled than the decode engine was told.
    """

    def __init__(
        self,
        session: ClientSession,
        prefill: Fleet,
        decode: Fleet,
        headers: CIMultiDict[str],
        entry: Entry,
        outlive: Callable[[PrefillLeg], None],
    ) -> None:
        """`outlive` takes a prefill leg that is still running when its request has been answered."""
        self._session = session
        self._prefill_fleet = prefill
        self._decode_fleet = decode
        self._headers = headers
        self._entry = entry
        self._outlive = outlive
        self._stack = ExitStack()
        self._prefill: PrefillLeg | None = None
        self._answer: Answer | None = None

    async def __aenter__(self) -> Dispatch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if self._answer is not None and kind is not None:
            self._answer.close()
        if self._prefill is None:
            return
        if kind is None and not self._prefill.done():
            self._outlive(self._prefill)
        else:
            await _cancel(self._prefill)

    async def open(self, body: Body) -> Answer:
        """Sends the legs and returns once the decode engine has begun to answer.

        Raises NoEngine if none does.
        """
        self._answer = await self._open(body)
        return self._answer

    async def _open(self, body: Body) -> Answer:
        source = self._prefill_fleet.pick(self._now())
        self._entry.why = why_alone(body) or ""
        if source is None or self._entry.why:
            return await self._decode(body)
        self._entry.prefill = source.url
        leg = prefill_leg(body, self._entry.transfer_id)
        busy = ExitStack()
        busy.enter_context(source.working())
        rank = busy.enter_context(source.ranks.working())
        told = rank.coordinates
        self._prefill = asyncio.create_task(self._ask_prefill(source, rank, leg))
        self._prefill.add_done_callback(lambda _: busy.close())
        if told is None:
            return await self._after_prefill(body, self._prefill)
        self._entry.mode = "both"
        first = decode_leg(body, self._entry.transfer_id, told.to_params())
        decode = asyncio.create_task(self._decode(first))
        try:
            await asyncio.wait({decode, self._prefill}, return_when=asyncio.FIRST_COMPLETED)
            instead = None if decode.done() else self._instead(body, self._prefill, told)
            if instead is None:
                return await decode
        except BaseException:
            await _cancel(decode)
            raise
        await _cancel(decode)
        return await self._decode(instead)

    def _instead(self, body: Body, prefill: PrefillLeg, told: Coordinates) -> Body | None:
        """What the decode engine is to be asked in place of what it waits for; None = let it wait."""
        if self._prefill_failed(prefill):
            return body
        params = prefill.result()
        found = Coordinates.from_params(params)
        # By the id alone: a daemon may be named by another address than it names itself.
        if found is None or found.engine_id == told.engine_id:
            return None
        self._entry.mode = "sequential"
        self._entry.why = f"{found.engine_id} prefilled, not {told.engine_id} as the decode engine was told"
        return decode_leg(body, self._entry.transfer_id, params)

    async def _after_prefill(self, body: Body, prefill: PrefillLeg) -> Answer:
        """Decode after prefill, with what prefill returned: how the first request finds its way."""
        self._entry.mode, self._entry.why = "sequential", "the prefill engine's coordinates are not known yet"
        await asyncio.wait({prefill})
        if self._prefill_failed(prefill):
            return await self._decode(body)
        params = prefill.result()
        if not params:
            self._entry.mode, self._entry.why = "alone", "the prefill engine returned no kv_transfer_params"
            return await self._decode(body)
        return await self._decode(decode_leg(body, self._entry.transfer_id, params))

    def _prefill_failed(self, prefill: PrefillLeg) -> bool:
        error = prefill.exception() if prefill.done() else None
        if error is None:
            return False
        if not isinstance(error, PrefillFailed):
            raise error
        self._entry.mode, self._entry.why = "alone", str(error)
        return True

    async def _ask_prefill(self, engine: Engine, rank: Rank, leg: Body) -> Mapping[str, Any]:
        """The prefill leg; returns the engine's kv_transfer_params (perhaps empty) and learns from them."""
        try:
            return await self._ask_rank(engine, rank, leg)
        except _NoSuchRank:
            engine.ranks.refused(rank)
            if rank.coordinates is not None:
                raise  # the decode engine waits for that rank's KV
        with engine.ranks.working() as other:
            return await self._ask_prefill(engine, other, leg)

    async def _ask_rank(self, engine: Engine, rank: Rank, leg: Body) -> Mapping[str, Any]:
        headers = self._headers.copy()
        # A rank that the client names is not passed on: the decode engine is told what is chosen here.
        headers.popall(RANK_HEADER, None)
        if rank.number is not None:
            headers[RANK_HEADER] = str(rank.number)
        self._entry.rank = rank.number
        try:
            async with self._session.post(
                engine.url + self._entry.path, data=json.dumps(leg), headers=headers
            ) as response:
                self._entry.prefill_status = response.status
                if response.status >= 400:
                    text = await response.text()
                    failure = _NoSuchRank if is_refusal(rank, response.status, text) else PrefillFailed
                    raise failure(f"the prefill engine answered {response.status}: {text[:200]}")
                answer = await response.json(content_type=None)
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            engine.rest(self._now())
            raise PrefillFailed(f"the prefill engine did not answer: {_say(error)}") from error
        params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        engine.ranks.learn(rank, params)
        return params if isinstance(params, dict) else {}

    async def _decode(self, leg: Body) -> Answer:
        """The decode leg, at the first decode engine that takes the connection."""
        tried: list[Engine] = []
        said: list[str] = []
        while (engine := self._decode_fleet.pick(self._now(), tried)) is not None:
            tried.append(engine)
            self._entry.decode = engine.url
            with ExitStack() as attempt:
                attempt.enter_context(engine.working())
                try:
                    response = await self._session.post(
                        engine.url + self._entry.path, data=json.dumps(leg), headers=self._headers
                    )
                    try:
                        first = await response.content.readany()
                    except BaseException:
                        response.close()
                        raise
                except (ClientError, OSError, TimeoutError) as error:
                    engine.rest(self._now())
                    said.append(f"{engine.url}: {_say(error)}")
                    continue
                self._stack.push(attempt.pop_all())
                return Answer(response, first)
        raise NoEngine("no decode engine answers (" + "; ".join(said) + ")")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Ends a task and takes note of whatever it ended with; an answer that it had opened is closed."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), Answer):
        task.result().close()


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__
