# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import re
import socket

import pytest
from aiohttp import ClientError

from kvpush_router.coordinates import Coordinates
from tests.router.tiny_engine import ASK, DEADLINE, Bench, TinyEngine, bench, prefill_answer, run

KNOWN = Coordinates("p0", "10.0.0.1", 7766)


def nobody() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_with_known_coordinates_both_legs_are_out_before_either_answers() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        p.gate.clear()
        d.gate.clear()
        async with bench([p], [d], KNOWN) as router:
            asked = asyncio.create_task(router.ask(ASK))
            (at_p,), (at_d,) = await p.wait_for(1), await d.wait_for(1)
            p.gate.set()
            d.gate.set()
            status, answer, headers = await asked
        transfer_id = at_p.body["kv_transfer_params"]["transfer_id"]
        assert re.fullmatch("[0-9a-f]{32}", transfer_id)
        assert at_p.body == {
            **ASK,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
            },
        }
        assert at_d.body == {
            **ASK,
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "p0",
                "remote_host": "10.0.0.1",
                "remote_port": 7766,
                "transfer_id": transfer_id,
            },
        }
        assert (status, answer) == (200, {"choices": [{"text": "hello"}]})
        assert headers["x-kvpush-transfer-id"] == transfer_id
        assert headers["x-engine"] == "tiny"

    run(body)


def test_the_first_request_relays_what_prefill_returned_and_the_next_goes_out_at_once() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        async with bench([p], [d]) as router:
            await router.ask(ASK)
            p.gate.clear()
            asked = asyncio.create_task(router.ask(ASK))
            await p.wait_for(2)
            first, second = (seen.body["kv_transfer_params"] for seen in await d.wait_for(2))
            p.gate.set()
            await asked
            lines = await router.lines(2)
        assert first["remote_request_id"] == "r7766"
        assert "remote_request_id" not in second
        assert second["remote_engine_id"] == "p0"
        assert second["tp_size"] == 1
        assert first["transfer_id"] != second["transfer_id"]
        assert [line["mode"] for line in lines] == ["sequential", "both"]

    run(body)


def test_a_restarted_prefill_engine_is_found_again_after_one_request() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer("p0", 7766)), TinyEngine()
        async with bench([p], [d]) as router:
            await router.ask(ASK)
            p.answer = prefill_answer("p1", 7767)
            d.gate.clear()
            asked = asyncio.create_task(router.ask(ASK))
            # What the decode engine was told is gone: it is not left waiting for it.
            await d.wait_for(3)
            d.gate.set()
            await asked
            await router.ask(ASK)
        engines = [seen.body["kv_transfer_params"]["remote_engine_id"] for seen in d.seen]
        assert engines == ["p0", "p0", "p1", "p1"]

    run(body)


def test_a_stream_reaches_the_client_piece_by_piece() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        d.gate.clear()
        async with bench([p], [d], KNOWN) as router:
            ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3}
            async with router.client.post(router.url + "/v1/completions", json=ask) as response:
                assert response.headers["Content-Type"].startswith("text/event-stream")
                assert await response.content.readline() == b'data: {"token": 1}\n'
                d.gate.set()
                rest = await response.content.read()
        assert rest == b"\ndata: [DONE]\n\n"
        assert "stream_options" not in p.seen[0].body
        assert "min_tokens" not in p.seen[0].body
        assert d.seen[0].body["stream_options"] == {"include_usage": True}

    run(body)


def test_a_client_that_leaves_takes_both_legs_with_it() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        p.gate.clear()
        d.gate.clear()
        async with bench([p], [d], KNOWN) as router:
            asked = asyncio.create_task(router.ask(ASK))
            (at_p,), (at_d,) = await p.wait_for(1), await d.wait_for(1)
            asked.cancel()
            async with asyncio.timeout(DEADLINE):
                await at_p.ended.wait()
                await at_d.ended.wait()
            (line,) = await router.lines(1)
        assert at_p.aborted
        assert at_d.aborted
        assert "status" not in line

    run(body)


def test_a_client_that_leaves_mid_stream_aborts_the_decode_leg() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        d.gate.clear()
        async with bench([p], [d], KNOWN) as router:
            ask = {**ASK, "stream": True}
            response = await router.client.post(router.url + "/v1/completions", json=ask)
            await response.content.readline()
            response.close()
            async with asyncio.timeout(DEADLINE):
                await d.seen[0].ended.wait()
        assert d.seen[0].aborted

    run(body)


def test_when_the_prefill_leg_fails_the_decode_engine_answers_without_waiting_for_kv() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer(), status=500), TinyEngine()
        p.gate.clear()
        d.gate.clear()
        async with bench([p], [d], KNOWN) as router:
            asked = asyncio.create_task(router.ask(ASK))
            await d.wait_for(1)
            p.gate.set()
            first, second = await d.wait_for(2)
            d.gate.set()
            status, _, headers = await asked
            (line,) = await router.lines(1)
        assert first.aborted
        assert second.body == ASK
        assert status == 200
        assert "x-kvpush-transfer-id" not in headers
        assert (line["mode"], line["prefill_status"]) == ("alone", 500)

    run(body)


def test_an_unknown_prefill_engine_that_is_down_does_not_stop_the_decode_engine() -> None:
    async def body() -> None:
        d = TinyEngine()
        async with bench([], [d], dead_prefill=[nobody()]) as router:
            status, _, _ = await router.ask(ASK)
            (line,) = await router.lines(1)
        assert status == 200
        assert d.seen[0].body == ASK
        assert "did not answer" in line["why"]

    run(body)


def test_a_prefill_engine_that_is_down_is_left_alone_for_a_while() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        async with bench([p], [d], dead_prefill=[nobody()]) as router:
            await router.ask(ASK)
            await router.ask(ASK)
            lines = await router.lines(2)
        assert [line["mode"] for line in lines] == ["alone", "sequential"]
        assert lines[1]["prefill"] == p.url

    run(body)


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_of_the_decode_engine_goes_to_the_client_as_it_is(status: int) -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine(lambda _: {"error": {"message": "no"}}, status)
        async with bench([p], [d], KNOWN) as router:
            got, answer, _ = await router.ask(ASK)
        assert (got, answer) == (status, {"error": {"message": "no"}})

    run(body)


def test_another_decode_engine_takes_over_from_one_that_is_down() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        async with bench([p], [d], KNOWN, dead_decode=[nobody()]) as router:
            status, _, _ = await router.ask(ASK)
            (line,) = await router.lines(1)
        assert status == 200
        assert line["decode"] == d.url

    run(body)


def test_with_every_engine_down_the_client_is_told_which() -> None:
    async def body() -> None:
        url = nobody()
        async with bench([], [], dead_decode=[url], dead_prefill=[nobody()]) as router:
            status, answer, _ = await router.ask(ASK)
            health = await router.client.get(router.url + "/health")
        assert status == 502
        assert url in answer["error"]["message"]
        assert health.status == 503

    run(body)


def test_the_request_id_reaches_both_engines_and_comes_back() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        async with bench([p], [d], KNOWN) as router:
            _, _, headers = await router.ask(ASK, **{"X-Request-Id": "abc", "Authorization": "Bearer k"})
            await router.ask(ASK)
        assert headers["X-Request-Id"] == "abc"
        for engine in (p, d):
            assert engine.seen[0].headers["X-Request-Id"] == "abc"
            assert engine.seen[0].headers["Authorization"] == "Bearer k"
        assert p.seen[1].headers["X-Request-Id"] == d.seen[1].headers["X-Request-Id"] != "abc"

    run(body)


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt": ["a", "b"]},
        {"prompt": None, "prompt_embeds": ["a", "b"]},
        {"prompt_embeds": "a"},
    ],
    ids=lambda extra: "-".join(extra),
)
def test_what_one_transfer_cannot_carry_goes_to_the_decode_engine_alone(extra: dict[str, object]) -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        async with bench([p], [d], KNOWN) as router:
            await router.ask({**ASK, **extra})
            (line,) = await router.lines(1)
        assert p.seen == []
        assert d.seen[0].body == {**ASK, **extra}
        assert line["mode"] == "alone"
        assert line["why"]

    run(body)


def test_chat_is_dispatched_like_completions() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        ask = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9}
        async with bench([p], [d], KNOWN) as router:
            await router.ask(ask, "/v1/chat/completions")
        assert p.seen[0].path == d.seen[0].path == "/v1/chat/completions"
        assert p.seen[0].body["max_completion_tokens"] == p.seen[0].body["max_tokens"] == 1
        assert d.seen[0].body["max_completion_tokens"] == 9

    run(body)


def test_requests_go_to_the_least_busy_engines() -> None:
    async def body() -> None:
        prefill = [TinyEngine(prefill_answer()) for _ in range(2)]
        decode = [TinyEngine() for _ in range(2)]
        for engine in decode:
            engine.gate.clear()
        async with bench(prefill, decode, KNOWN) as router:
            asked = [asyncio.create_task(router.ask(ASK)) for _ in range(4)]
            for engine in decode:
                await engine.wait_for(2)
            for engine in decode:
                engine.gate.set()
            await asyncio.gather(*asked)
        assert [len(engine.seen) for engine in (*prefill, *decode)] == [2, 2, 2, 2]

    run(body)


def test_a_prefill_engine_is_busy_only_while_it_prefills() -> None:
    async def body() -> None:
        first, second, d = TinyEngine(prefill_answer()), TinyEngine(prefill_answer()), TinyEngine()
        d.gate.clear()
        async with bench([first, second], [d]) as router:
            one = asyncio.create_task(router.ask(ASK))
            # Without coordinates the decode leg follows the prefill leg: that one is over now.
            await d.wait_for(1)
            two = asyncio.create_task(router.ask(ASK))
            await d.wait_for(2)
            d.gate.set()
            await asyncio.gather(one, two)
        assert (len(first.seen), len(second.seen)) == (2, 0)

    run(body)


def test_an_answer_does_not_wait_for_a_prefill_leg_that_nobody_needs() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        p.gate.clear()
        async with bench([p], [d], KNOWN) as router:
            status, _, _ = await router.ask(ASK)
            await router.lines(1)
            assert not p.seen[0].ended.is_set()
            async with asyncio.timeout(DEADLINE):
                await p.seen[0].ended.wait()
        assert status == 200
        assert p.seen[0].aborted

    run(body)


def test_models_and_health_come_from_the_decode_engine() -> None:
    async def body() -> None:
        d = TinyEngine(lambda _: {"data": [{"id": "m"}]})
        async with bench([], [d], dead_prefill=[nobody()]) as router:
            async with router.client.get(router.url + "/v1/models") as models:
                assert await models.json() == {"data": [{"id": "m"}]}
            async with router.client.get(router.url + "/health") as health:
                assert health.status == 200

    run(body)


@pytest.mark.parametrize("raw", [b"{", b"[1]"])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    async def body() -> None:
        async with (
            bench([TinyEngine()], [TinyEngine()], KNOWN) as router,
            router.client.post(router.url + "/v1/completions", data=raw) as response,
        ):
            assert response.status == 400
            assert "JSON" in (await response.json())["error"]["message"]

    run(body)


def test_an_answer_that_breaks_off_breaks_off_for_the_client_too() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        d.gate.clear()

        async def read(router: Bench) -> None:
            ask = {**ASK, "stream": True}
            async with router.client.post(router.url + "/v1/completions", json=ask) as response:
                await response.content.readline()
                d.breaks()
                await response.content.read()

        async with bench([p], [d], KNOWN) as router:
            with pytest.raises(ClientError):
                await read(router)
            (line,) = await router.lines(1)
        assert line["why"].startswith("broke off")

    run(body)
