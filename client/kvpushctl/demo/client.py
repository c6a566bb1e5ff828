# SPDX-License-Identifier: Apache-2.0
"""What the demo asks the router, and what it reads off D meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpushctl.demo.account import Asked
from kvpushctl.demo.counters import Counters
from kvpushctl.demo.engine import MODEL, Engine
from kvpushctl.demo.prompts import OUTPUT_TOKENS, Prompt
from kvpushctl.errors import CommandError

if TYPE_CHECKING:
    from aiohttp import ClientSession

TRANSFER_HEADER = "x-kvpush-transfer-id"
_COUNT_SECONDS = 10.0


class Client:
    """Asks for completions through the router."""

    def __init__(self, session: ClientSession, router: str, decode: Engine) -> None:
        self._session = session
        self._router = router
        self._decode = decode

    async def one(self, prompt: Prompt, expected: Sequence[int]) -> Asked:
        """One prompt alone: what D counts meanwhile is its share."""
        before = await self._decode.counters(self._session)
        asked, _ = await self._ask(self._router, prompt)
        counted = (await self._counted(before, len(prompt.tokens), self._decode)).since(before)
        return _asked(prompt, expected, asked, counted.local + counted.external, counted.local)

    async def together(
        self, prompts: Sequence[Prompt], expected: Sequence[Sequence[int]]
    ) -> tuple[list[Asked], Counters]:
        """All at once; and what D counted for all of them."""
        before = await self._decode.counters(self._session)
        answers = await asyncio.gather(*(self._ask(self._router, prompt) for prompt in prompts))
        total = sum(len(prompt.tokens) for prompt in prompts)
        counted = (await self._counted(before, total, self._decode)).since(before)
        found = [
            _asked(prompt, tokens, asked, cached, None)
            for prompt, tokens, (asked, cached) in zip(prompts, expected, answers, strict=True)
        ]
        return found, counted

    async def nudge(self, engine: Engine) -> Counters:
        """Has an idle engine take a step: what it showed may be from before its last blocks came back."""
        before = await engine.counters(self._session)
        await self._ask(engine.url, Prompt((before.prompt_tokens % 1000 + 4,), "nudge"))
        return await self._counted(before, 1, engine)

    async def _ask(self, url: str, prompt: Prompt) -> tuple[dict[str, Any], int]:
        from aiohttp import ClientError

        body = {
            "model": MODEL,
            "prompt": list(prompt.tokens),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        sent = time.time_ns()
        try:
            async with self._session.post(url + "/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise CommandError(f"{prompt.about!r} was answered with {response.status}: {text[:500]}")
                answer = json.loads(text)
                transfer_id = response.headers.get(TRANSFER_HEADER, "")
        except (ClientError, TimeoutError) as error:
            raise CommandError(
                f"{prompt.about!r} was not answered: {error or type(error).__name__}"
            ) from None
        details = answer["usage"].get("prompt_tokens_details") or {}
        said = {
            "output": tuple(answer["choices"][0]["token_ids"]),
            "transfer_id": transfer_id,
            "sent_unix_ns": sent,
        }
        return said, int(details.get("cached_tokens") or 0)

    async def _counted(self, before: Counters, tokens: int, engine: Engine) -> Counters:
        """Its counters once they hold `tokens` more prompt tokens; they follow the answer by a moment."""

        async def look() -> Counters | None:
            now = await engine.counters(self._session)
            return now if now.prompt_tokens >= before.prompt_tokens + tokens else None

        return await engine.child.until(f"the count of {tokens} more prompt tokens", look, _COUNT_SECONDS)


def _asked(
    prompt: Prompt, expected: Sequence[int], said: dict[str, Any], cached: int, local: int | None
) -> Asked:
    return Asked(
        about=prompt.about,
        prompt_tokens=len(prompt.tokens),
        output=said["output"],
        expected=tuple(expected),
        transfer_id=said["transfer_id"],
        sent_unix_ns=said["sent_unix_ns"],
        cached_tokens=cached,
        local_tokens=local,
    )
