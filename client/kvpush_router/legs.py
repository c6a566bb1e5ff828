# SPDX-License-Identifier: Apache-2.0
"""The two legs of a request: what the prefill engine and the decode engine are each asked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]


def mint_transfer_id() -> str:
    """A name for one dispatch of one request: 128 unguessable bits as 32 hex digits."""
    return secrets.token_hex(16)


def why_alone(body: Body) -> str | None:
    """Why the decode engine must answer this by itself, in a few words; None if it need not.

    One transfer carries the KV of one sequence. Several sequences of one request would each claim the
    same transfer, and what needs the logits of the prompt needs its forward pass, not its KV.
    """
    for field in ("n", "best_of"):
        count = body.get(field)
        if isinstance(count, int) and count > 1:
            return f"{field} > 1: several sequences would claim one transfer"
    if body.get("use_beam_search"):
        return "use_beam_search: several sequences would claim one transfer"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several prompts: they would claim one transfer"
    embeds = body.get("prompt_embeds")
    if embeds and (prompt or not isinstance(embeds, str)):
        return "prompt_embeds: several prompts would claim one transfer"
    for field in ("echo", "prompt_logprobs"):
        value = body.get(field)
        if value is not None and value is not False:
            return f"{field}: the prompt's own logits are asked for"
    if body.get("kv_transfer_params"):
        return "kv_transfer_params: the client dispatches by itself"
    return None


def prefill_leg(body: Body, transfer_id: str) -> dict[str, Any]:
    """The client's request, cut down to the prompt and one token that nobody reads."""
    # min_tokens above max_tokens, and stream_options without stream, are refused by the engine.
    left_out = ("stream_options", "min_tokens", "n", "best_of")
    leg = {key: value for key, value in body.items() if key not in left_out}
    leg |= {"max_tokens": 1, "stream": False}
    if "messages" in body or "max_completion_tokens" in body:
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    return leg


def decode_leg(body: Body, transfer_id: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The client's request, told where its KV will come from.

    `source` is the prefill engine's coordinates, or all that it returned for this very request.
    """
    return {
        **body,
        "kv_transfer_params": {
            **source,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": source.get("transfer_id") or transfer_id,
        },
    }
