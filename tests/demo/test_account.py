# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvpush_client._proto import admin_pb2, types_pb2
from kvpushctl.demo.account import Account, Asked, owed, settle
from kvpushctl.demo.report import Leaks, Report

BLOCK = 32
SENT = 1_800_000_000_000_000_000


def asked(prompt_tokens: int, cached: int, local: int | None, output: tuple[int, ...] = (7, 8)) -> Asked:
    return Asked("a prompt", prompt_tokens, output, (7, 8), "ab", SENT, cached, local)


def received(start: int = 0) -> admin_pb2.Transfer:
    return admin_pb2.Transfer(
        half=admin_pb2.Half(start=start, phase=admin_pb2.PHASE_ENDED),
        times=types_pb2.TransferTimes(
            opened_unix_ns=SENT + 1_000_000,
            matched_unix_ns=SENT + 2_000_000,
            landed_unix_ns=SENT + 9_000_000,
            ended_unix_ns=SENT + 9_500_000,
        ),
        sender_times=types_pb2.TransferTimes(
            first_post_unix_ns=SENT + 3_000_000, sealed_unix_ns=SENT + 8_000_000
        ),
        first_token_unix_ns=SENT + 10_000_000,
    )


def sent(chunks: int, early: int) -> admin_pb2.Transfer:
    counts = types_pb2.TransferCounts(bytes=chunks * 4096, chunks=chunks, chunks_before_seal=early)
    return admin_pb2.Transfer(sending=True, counts=counts)


@pytest.mark.parametrize(
    ("prompt_tokens", "local", "due"),
    [(1, 0, 0), (31, 0, 0), (32, 0, 0), (33, 0, 32), (3000, 0, 2999), (3000, 2976, 0), (3000, 960, 2039)],
)
def test_all_that_is_lacking_but_the_last_is_owed_unless_it_is_a_block_or_less(
    prompt_tokens: int, local: int, due: int
) -> None:
    assert owed(prompt_tokens, local, BLOCK) == due


def test_a_prompt_that_was_received_has_every_number_and_every_phase() -> None:
    account = settle(asked(3000, cached=2999, local=0), BLOCK, [received()], [sent(6, early=5)])
    assert account.output_equal
    assert (account.external_tokens, account.recomputed_tokens, account.own_tokens) == (2999, 0, 1)
    assert (account.bytes_pushed, account.chunks, account.chunks_before_seal) == (6 * 4096, 6, 5)
    assert account.phases_ms == {
        "reserve": 1,
        "announce": 2,
        "first_byte": 3,
        "seal": 8,
        "landed": 9,
        "first_token": 10,
    }


def test_a_prompt_that_came_to_nothing_is_recomputed() -> None:
    failed = received()
    failed.fault.detail = "the link broke"
    account = settle(asked(3000, cached=992, local=992), BLOCK, [failed], [])
    assert (account.external_tokens, account.recomputed_tokens, account.own_tokens) == (0, 2007, 1)
    assert account.fault == "the link broke"


def test_a_prompt_of_a_block_is_the_decode_engines_own() -> None:
    account = settle(asked(32, cached=0, local=0), BLOCK, [], [])
    assert (account.recomputed_tokens, account.own_tokens) == (0, 32)
    assert account.phases_ms == {}


def test_among_several_at_once_the_reservation_tells_what_was_in_the_cache() -> None:
    account = settle(asked(3000, cached=2999, local=None), BLOCK, [received(start=960)], [sent(1, 0)])
    assert (account.local_tokens, account.external_tokens) == (960, 2039)
    assert settle(asked(33, cached=32, local=None), BLOCK, [], []).local_tokens == 32


def test_among_several_at_once_a_transfer_that_failed_brought_nothing() -> None:
    failed = received()
    failed.fault.detail = "the link broke"
    account = settle(asked(3000, cached=960, local=None), BLOCK, [failed], [])
    assert (account.local_tokens, account.external_tokens, account.recomputed_tokens) == (960, 0, 2039)


def report(*accounts: Account, leaks: Leaks | None = None) -> Report:
    return Report({}, accounts, leaks or Leaks(0, 0, 0), [])


def well() -> Account:
    return settle(asked(33, cached=32, local=0), BLOCK, [received()], [sent(1, 0)])


def test_a_report_without_a_flaw_has_no_failures() -> None:
    assert report(well()).failures() == []
    assert report(well()).document()["verdict"] == "identical"


def test_a_differing_output_makes_the_verdict_and_fails() -> None:
    wrong = settle(asked(33, 32, 0, output=(7, 9)), BLOCK, [received()], [sent(1, 0)])
    found = report(well(), wrong)
    assert found.document()["verdict"] == "different"
    assert [one["output_equal"] for one in found.document()["prompts"]] == [True, False]
    assert len(found.failures()) == 1


def test_equal_outputs_that_were_recomputed_fail_all_the_same() -> None:
    found = report(settle(asked(33, 0, 0), BLOCK, [], []))
    assert found.document()["verdict"] == "identical"
    assert "32 positions were recomputed" in found.failures()[0]


@pytest.mark.parametrize("leaks", [Leaks(1, 0, 0), Leaks(0, 1, 0), Leaks(0, 0, 1)])
def test_whatever_is_still_held_fails(leaks: Leaks) -> None:
    found = report(well(), leaks=leaks)
    assert "still held" in found.failures()[0]
    assert sum(found.document()["leaks"].values()) == 1
