# SPDX-License-Identifier: Apache-2.0
"""What a session says of its attempts."""

from __future__ import annotations

import logging
import threading

import pytest

from kvpush_client.errors import DaemonUnreachable
from kvpush_client.retry import Retries

LOST = DaemonUnreachable("a session of this engine ended: join again")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_loss_is_said_each_time_and_an_attempt_that_fails_as_the_one_before_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    retries = Retries(threading.Event())
    for connected in (True, False, True):
        retries.wait(connected, LOST)
    retries.wait(False, DaemonUnreachable("no socket"))
    said = "kvpushd: a session of this engine ended: join again; trying again"
    assert warnings(caplog) == [said, said, "kvpushd: no socket; trying again"]


@pytest.mark.parametrize("connected", [True, False])
def test_an_engine_that_closes_its_sessions_one_by_one_warns_of_nothing(
    caplog: pytest.LogCaptureFixture, connected: bool
) -> None:
    closing = threading.Event()
    closing.set()
    Retries(closing).wait(connected, LOST)
    assert not warnings(caplog)


def test_the_end_of_the_wait_comes_before_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    closing = threading.Event()
    waiting = threading.Thread(target=Retries(closing).wait, args=(True, LOST))
    waiting.start()
    closing.set()
    waiting.join(30)
    assert not warnings(caplog)
