# SPDX-License-Identifier: Apache-2.0
"""Requests of the HTTP port and calls of admin.sock that nobody should make: which answer each gets."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.node import DEADLINE
from tests.daemon.daemon_kit import eventually
from tests.fuzz.conftest import Target
from tests.fuzz.doors.http import PATHS, QUIET, HttpDoor

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]

METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
NAMES = {path[1:] for path in PATHS}
UNKNOWN = st.text(max_size=40).filter(lambda text: text not in NAMES)
QUERIES = st.sampled_from(["", "?", "?name[]=x", "?" + "a=b&" * 50])
HEADERS = st.lists(
    st.sampled_from(
        [
            "Accept: ;q=,;version=x",
            "Accept: application/openmetrics-text",
            "X: y",
            "Cookie: =;=",
            "Range: bytes=9-1",
        ]
    ),
    max_size=3,
)
CLOSE = b"Connection: close\r\n\r\n"
MALFORMED = {
    "no host": b"GET /healthz HTTP/1.1\r\n" + CLOSE,
    "a method of nobody": b"FETCH /healthz HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "no path": b"GET HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "no slash": b"GET healthz HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "no such version": b"GET /healthz HTTP/9.9\r\nHost: x\r\n" + CLOSE,
    "a path of no characters": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "a path without an end": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "a port of nobody": b"GET http://x:99999/healthz HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "half an address": b"GET http://[ HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "a header without a value": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA\r\n" + CLOSE,
    "a header of zeros": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: \0\r\n" + CLOSE,
    "a header without an end": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 70_000 + b"\r\n" + CLOSE,
    "headers without an end": b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: x\r\n" * 20_000 + CLOSE,
    "two lengths": b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n" + CLOSE,
    "a length that is none": b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n" + CLOSE,
    "a length and chunks": b"POST /healthz HTTP/1.1\r\nHost: x\r\n"
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    + CLOSE,
    "what can't be expected": b"GET /healthz HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\n" + CLOSE,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}
CUT = [
    b"GET /metr",
    b"GET /metrics HTTP/1.1\r\nHost: x",
    b"\r\n" * 50,
    b"",
]


@pytest.fixture
def http(target: Target) -> Iterator[HttpDoor]:
    """The door of a node that is ready, and that no request makes stumble."""
    eventually(lambda: target.node.http("/readyz")[0] == 200)
    door = target.doors["http"]
    assert isinstance(door, HttpDoor)
    yield door
    assert not target.node.stumbles()


def request(method: str, path: str, headers: list[str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode()


quick = settings(
    derandomize=True,
    database=None,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@quick
@given(st.sampled_from(PATHS), QUERIES, HEADERS)
def test_what_is_served_is_served_whatever_comes_with_the_request(
    http: HttpDoor, path: str, query: str, headers: list[str]
) -> None:
    for method in ("GET", "HEAD"):
        assert http.statuses(request(method, path + query, headers), DEADLINE) == [200]


@quick
@given(st.sampled_from(PATHS), st.sampled_from(METHODS), HEADERS)
def test_a_method_that_would_change_something_is_not_allowed(
    http: HttpDoor, path: str, method: str, headers: list[str]
) -> None:
    assert http.statuses(request(method, path, headers), DEADLINE) == [405]


@quick
@given(UNKNOWN, st.sampled_from(("GET", "HEAD", *METHODS)), HEADERS)
def test_a_path_that_is_not_served_is_not_found_by_any_method(
    http: HttpDoor, text: str, method: str, headers: list[str]
) -> None:
    assert http.statuses(request(method, "/" + quote(text, safe=""), headers), DEADLINE) == [404]


@pytest.mark.parametrize("said", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_the_callers_fault(http: HttpDoor, said: bytes) -> None:
    (status,) = http.statuses(said, DEADLINE if said.endswith(CLOSE) else QUIET)
    assert 400 <= status < 500


@pytest.mark.parametrize("said", CUT, ids=repr)
def test_a_request_that_is_cut_off_gets_an_end_and_no_answer(http: HttpDoor, said: bytes) -> None:
    assert http.statuses(said) == []


def test_malformed_requests_again_and_again_are_said_once_with_the_reason(
    target: Target, http: HttpDoor
) -> None:
    said = MALFORMED["two lengths"]

    def lines() -> list[str]:
        return [line for line in target.node.log.read_text().splitlines() if '"request refused"' in line]

    before = len(lines())
    for _ in range(40):
        http.statuses(said, DEADLINE)
    # Within 30 s each kind is said once, perhaps with the reason of a request of the tests before.
    assert len(lines()) - before < 20
    assert lines()
    assert all('"reason": "' in line for line in lines())


SERVICES = ("AdminService", "EngineService", "PeerService", "Nobody", "")


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("method", ["", "Session", "Link", "drain", "GetStatus/", "../Drain", "\u00df"])
def test_a_call_that_admin_does_not_have_is_said_to_be_none(
    target: Target, service: str, method: str
) -> None:
    with grpc.insecure_channel(f"unix:{target.node.runtime_dir}/admin.sock") as channel:
        call = channel.unary_unary(f"/kvpush.v1.{service}/{quote(method)}")
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", timeout=DEADLINE)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
