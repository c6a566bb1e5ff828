# SPDX-License-Identifier: Apache-2.0
"""An engine's answer, and its way to the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import ClientResponse, web
from multidict import CIMultiDict

# RFC 9110, 7.6.1, and what the server sets anew for the body that it sends.
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
        *("host", "content-length", "content-encoding", "accept-encoding", "date", "server"),
    }
)


def end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that are meant for the other end, not for the next hop."""
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in HOP_BY_HOP)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose first bytes have come. Whoever holds it either relays or closes it."""

    response: ClientResponse
    first: bytes

    async def relay(
        self, request: web.Request, extra: Mapping[str, str], started: Callable[[], None]
    ) -> web.StreamResponse:
        """Sends the answer to the client as it comes, status and errors as they are.

        `started` is called once the first byte was sent. Raises aiohttp.ClientError when the engine's
        side breaks, ConnectionResetError when the client's does.
        """
        headers = end_to_end(self.response.headers)
        headers.update(extra)
        out = web.StreamResponse(status=self.response.status, headers=headers)
        length = self.response.headers.get("Content-Length")
        if length is not None and "Content-Encoding" not in self.response.headers:
            out.content_length = int(length)
        await out.prepare(request)
        await out.write(self.first)
        started()
        async for chunk in self.response.content.iter_any():
            await out.write(chunk)
        await out.write_eof()
        return out

    def close(self) -> None:
        """Gives the connection up; an engine that is still computing takes it as an abort."""
        self.response.close()


def refusal(status: int, message: str, kind: str) -> web.Response:
    """An error of the router's own, in OpenAI's form."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)
