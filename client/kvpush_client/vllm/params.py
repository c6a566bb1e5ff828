# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: what a router says about a request, and what P answers.

The schema is the ecosystem's, so that routers that relay P's answer to D work unchanged. Towards P:

    do_remote_decode: true     hand the prompt's KV off
    transfer_id                optional; names the transfer
    receiver_engine_id         optional; the only engine that may receive it

Towards D, as P answered it or with P's static coordinates:

    do_remote_prefill: true    the prompt's KV comes from elsewhere
    remote_engine_id, remote_host, remote_port    P's engine, and P's daemon
    remote_request_id, transfer_id                 at least one, see below

Other keys are ignored. **The transfer_id**, 16 bytes, is

1. what the router says: 32 hexadecimal digits are taken as they are, any other string is hashed;
2. else, if the request's own id carries a UUID (as vLLM's and routers' ids do), derived from that UUID and
   P's engine_id. That is as unguessable as the UUID, and a D that is dispatched at the same time under the
   same X-Request-Id, or is given `remote_request_id`, derives the same. What vLLM puts around an id (`cmpl-`,
   the eight random digits at the end, the child number of n > 1) does not count; a prompt's number does;
3. else random on P, which returns it. A D without any of these computes locally.

With n > 1 all children of a request bear the same id: the first is transferred, the others are duplicates
and compute locally.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpush_client.items import Sender
from kvpush_client.wire import MAX_TEXT

_HEX_ID = re.compile(r"[0-9a-fA-F]{32}\Z")
# A UUID with or without dashes, then perhaps the number of the prompt within its request.
_UUID = re.compile(
    r"(?<![0-9a-f])([0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12})(?![0-9a-f])(?:-(\d{1,6})(?=-|\Z))?",
    re.IGNORECASE,
)
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z", re.IGNORECASE)
# Of what is hashed; all else must fit a message to the daemon.
_MAX_ID = 1024


class Malformed(ValueError):
    """The params can't be followed; says which field, what it was, what was expected."""


@dataclass(frozen=True, slots=True)
class Receive:
    """D's leg: the KV comes from `sender`."""

    transfer_id: bytes
    sender: Sender


@dataclass(frozen=True, slots=True)
class Send:
    """P's leg: the KV goes to whoever knows the id, or only to `receiver_engine_id` where that is named."""

    transfer_id: bytes
    receiver_engine_id: str


def parse(params: object, request_id: str, engine_id: str) -> Receive | Send | None:
    """What is asked of this engine; None = nothing.

    Raises Malformed. `request_id` is vLLM's own, `engine_id` this engine's.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise Malformed(f"kv_transfer_params is {type(params).__name__}, expected an object")
    receive, send = _flag(params, "do_remote_prefill"), _flag(params, "do_remote_decode")
    if receive and send:
        raise Malformed("do_remote_prefill and do_remote_decode are both true: a request is one leg")
    if receive:
        return _receive(params, request_id)
    if send:
        given = _text(params, "transfer_id", optional=True)
        transfer_id = _explicit(given) if given else derived(engine_id, request_id)
        receiver = _text(params, "receiver_engine_id", optional=True, most=MAX_TEXT)
        return Send(transfer_id or secrets.token_bytes(16), receiver)
    return None


def _receive(params: Mapping[Any, Any], request_id: str) -> Receive:
    engine_id = _text(params, "remote_engine_id", most=MAX_TEXT)
    host = _text(params, "remote_host", most=MAX_TEXT)
    port = params.get("remote_port")
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port)  # routers relay what they were configured with
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise Malformed(f"remote_port is {port!r:.80}, expected the port of P's daemon, 1 to 65535")
    given = _text(params, "transfer_id", optional=True)
    remote_request_id = _text(params, "remote_request_id", optional=True)
    if given:
        transfer_id: bytes | None = _explicit(given)
    else:
        transfer_id = derived(engine_id, remote_request_id or request_id)
    if transfer_id is None:
        raise Malformed(
            "there is no transfer_id, and no UUID in remote_request_id or the request's own id to derive it "
            "from: have the router set transfer_id, or send X-Request-Id with a UUID to both legs"
        )
    return Receive(transfer_id, Sender(engine_id, host, port))


def answer(send: Send, request_id: str, engine_id: str, host: str, port: int, tp_size: int) -> dict[str, Any]:
    """What P returns with its output, for the router to give to D."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": request_id,
        "tp_size": tp_size,
        "transfer_id": send.transfer_id.hex(),
    }


def derived(sender_engine_id: str, request_id: str) -> bytes | None:
    """The transfer_id that both legs derive from the UUID in a request id; None if it carries none."""
    found = list(_UUID.finditer(_SUFFIX.sub("", request_id)))
    if not found:
        return None
    uuid, prompt = found[-1].groups()
    named = f"{sender_engine_id}\0{uuid.replace('-', '').lower()}\0{int(prompt or 0)}"
    return hashlib.blake2b(named.encode(), digest_size=16, person=b"kvpush derived").digest()


def _explicit(given: str) -> bytes:
    if _HEX_ID.match(given):
        return bytes.fromhex(given)
    return hashlib.blake2b(given.encode(), digest_size=16, person=b"kvpush given").digest()


def _flag(params: Mapping[Any, Any], name: str) -> bool:
    value = params.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Malformed(f"{name} is {value!r:.80}, expected true or false")
    return value


def _text(params: Mapping[Any, Any], name: str, *, optional: bool = False, most: int = _MAX_ID) -> str:
    value = params.get(name)
    if value is None and optional:
        return ""
    if not isinstance(value, str) or not (value or optional) or len(value) > most:
        raise Malformed(f"{name} is {value!r:.80}, expected a string of 1 to {most} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half a surrogate pair, and neither hashing nor protobuf takes it.
        raise Malformed(f"{name} is {value!r:.80}, expected Unicode text: {error.reason}") from None
    return value
