# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import pytest

from kvpush_router.coordinates import Coordinates
from kvpush_router.ranks import Rank, Ranks
from tests.router.tiny_engine import (
    ASK,
    Bench,
    Seen,
    TinyEngine,
    bench,
    parallel_answer,
    prefill_answer,
    run,
)


def rank_of(seen: Seen) -> str | None:
    return seen.headers.get("X-data-parallel-rank")


def told(seen: Seen) -> str:
    return str(seen.body["kv_transfer_params"]["remote_engine_id"])


async def learn(router: Bench, count: int) -> None:
    """Asks until a data-parallel server of `count` engines is known: once without a rank, once with each."""
    for _ in range(1 + count):
        await router.ask(ASK)


@pytest.mark.parametrize(("count", "first"), [(2, 0), (3, 0), (2, 2), (1, 1)], ids=str)
def test_the_engines_of_a_data_parallel_server_are_learned_and_then_each_request_is_pinned_to_one(
    count: int, first: int
) -> None:
    async def body() -> None:
        p, d = TinyEngine(parallel_answer(count, first=first)), TinyEngine()
        async with bench([p], [d]) as router:
            await learn(router, count)
            await router.ask(ASK)  # tries one number more, which is refused
            before = len(p.seen)
            d.seen.clear()
            p.gate.clear()
            for nth in range(count):
                asked = asyncio.create_task(router.ask(ASK))
                await asyncio.gather(p.wait_for(before + nth + 1), d.wait_for(nth + 1))
                p.gate.set()
                assert (await asked)[0] == 200
                p.gate.clear()
            lines = await router.lines(2 + 2 * count)
        assert [line["mode"] for line in lines] == ["sequential"] * (2 + count) + ["both"] * count
        pinned = [int(rank_of(seen) or -1) for seen in p.seen[before:]]
        assert sorted(pinned) == list(range(count))
        assert [told(seen) for seen in d.seen] == [f"p_dp{first + rank}" for rank in pinned]
        assert [line["rank"] for line in lines[-count:]] == pinned

    run(body)


def test_requests_at_once_are_spread_over_the_engines_of_a_server() -> None:
    async def body() -> None:
        p, d = TinyEngine(parallel_answer(2)), TinyEngine()
        async with bench([p], [d]) as router:
            await learn(router, 3)
            p.seen.clear()
            d.gate.clear()
            p.gate.clear()
            asked = [asyncio.create_task(router.ask(ASK)) for _ in range(6)]
            await p.wait_for(6)
            p.gate.set()
            d.gate.set()
            await asyncio.gather(*asked)
        assert sorted(rank_of(seen) or "" for seen in p.seen) == ["0"] * 3 + ["1"] * 3

    run(body)


def test_a_decode_engine_that_was_told_another_engine_than_prefilled_is_asked_again_at_once() -> None:
    async def body() -> None:
        # The engine= of the flags: what vLLM was given, without what it adds.
        p, d = TinyEngine(parallel_answer(2)), TinyEngine()
        p.gate.clear()
        d.gate.clear()
        async with bench([p], [d], Coordinates("p", "10.0.0.1", 7766)) as router:
            asked = asyncio.create_task(router.ask(ASK))
            await d.wait_for(1)
            p.gate.set()
            first, second = await d.wait_for(2)
            d.gate.set()
            status, _, _ = await asked
            await learn(router, 2)
            await router.ask(ASK)
            lines = await router.lines(5)
        assert (told(first), first.aborted) == ("p", True)
        assert (told(second), second.aborted, status) == ("p_dp0", False, 200)
        assert lines[0]["why"] == "p_dp0 prefilled, not p as the decode engine was told"
        assert lines[-1]["mode"] == "both"

    run(body)


def test_an_answer_that_has_begun_is_not_ended_because_another_engine_prefilled() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer("p1")), TinyEngine()
        p.gate.clear()
        d.gate.clear()
        async with bench([p], [d], Coordinates("p0", "10.0.0.1", 7766)) as router:
            ask = {**ASK, "stream": True}
            async with router.client.post(router.url + "/v1/completions", json=ask) as response:
                await response.content.readline()
                p.gate.set()
                await p.seen[0].ended.wait()
                d.gate.set()
                assert await response.content.read() == b"\ndata: [DONE]\n\n"
        assert len(d.seen) == 1

    run(body)


@pytest.mark.parametrize("suffix", ["_dp", "-"])
def test_where_engines_can_not_be_pinned_decode_follows_prefill(suffix: str) -> None:
    async def body() -> None:
        # Something between drops the header, or spreads requests over servers.
        p, d = TinyEngine(), TinyEngine()
        p.answer = lambda seen: prefill_answer(f"p{suffix}{len(p.seen) % 2}")(seen)
        async with bench([p], [d]) as router:
            for _ in range(6):
                await router.ask(ASK)
            d.seen.clear()
            p.seen.clear()
            for _ in range(4):
                await router.ask(ASK)
            lines = await router.lines(10)
        assert [line["mode"] for line in lines[-4:]] == ["sequential"] * 4
        assert [told(seen) for seen in d.seen] == [f"p{suffix}{at % 2}" for at in (1, 2, 3, 4)]
        assert all(rank_of(seen) is None for seen in p.seen)

    run(body)


def test_a_data_parallel_server_that_comes_back_under_another_name_or_smaller_is_learned_again() -> None:
    async def body() -> None:
        p, d = TinyEngine(parallel_answer(2)), TinyEngine()
        async with bench([p], [d]) as router:
            await learn(router, 3)
            for base, count in (("q", 2), ("q", 1), ("r", 3)):
                p.answer = parallel_answer(count, base=base)
                for _ in range(6):
                    assert (await router.ask(ASK))[0] == 200
                p.seen.clear()
                d.seen.clear()
                for _ in range(count):
                    await router.ask(ASK)
                assert sorted(rank_of(seen) or "" for seen in p.seen) == [str(rank) for rank in range(count)]
                assert sorted(map(told, d.seen)) == [f"{base}_dp{rank}" for rank in range(count)]

    run(body)


def test_a_rank_that_the_client_names_reaches_the_decode_engine_only() -> None:
    async def body() -> None:
        p, d = TinyEngine(prefill_answer()), TinyEngine()
        async with bench([p], [d]) as router:
            await router.ask(ASK, **{"x-data-parallel-rank": "1"})
        assert rank_of(p.seen[0]) is None
        assert rank_of(d.seen[0]) == "1"

    run(body)


def test_a_server_that_did_not_answer_may_come_back_with_more_engines() -> None:
    ranks = Ranks()

    def ask(count: int) -> int | None:
        with ranks.working() as rank:
            if rank.number is not None and rank.number >= count:
                ranks.refused(rank)
            else:
                ranks.learn(rank, Coordinates(f"p_dp{rank.number or 0}", "h", 1).to_params())
            return rank.number

    assert [ask(1) for _ in range(5)] == [None, 0, 1, 0, 0]
    ranks.doubt()
    assert [ask(2) for _ in range(4)] == [1, 2, 0, 1]


def test_one_number_is_tried_at_a_time_and_meanwhile_the_server_chooses() -> None:
    ranks = Ranks(Coordinates("p_dp0", "h", 1))
    with ranks.working() as tried, ranks.working() as other:
        assert (tried.number, other.number, other.coordinates) == (0, None, None)
    with ranks.working() as again:
        assert again.number == 0


def test_what_an_engine_does_not_say_of_itself_changes_nothing() -> None:
    known = Coordinates("p", "h", 1)
    ranks = Ranks(known)
    ranks.learn(Rank(), None)
    ranks.learn(Rank(), {"remote_engine_id": "q"})
    with ranks.working() as rank:
        assert rank.coordinates == known
