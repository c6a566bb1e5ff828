# SPDX-License-Identifier: Apache-2.0
"""What is written to stderr, seen from a process of its own: logging is the process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpushd.logs import Sparing

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import logging, sys, structlog
from kvpushd import logs
logs.set_up(sys.argv[1], sys.argv[2], sys.stderr)
structlog.get_logger("kvpushd.test").info("link up", address="a:1", size=3)
logging.getLogger("asyncio").warning("took %s s", 3)
secret = "the-token" + sys.argv[1]
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("kvpushd.test").exception("went wrong")
"""


def written(level: str, style: str) -> list[str]:
    path = f"{ROOT}:{ROOT / 'client'}"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, level, style],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.stdout == ""
    return ran.stderr.splitlines()


@pytest.mark.parametrize("style", ["json", "auto"])
def test_off_a_terminal_every_line_is_json_whoever_wrote_it(style: str) -> None:
    ours, theirs, wrong = (json.loads(line) for line in written("info", style))
    assert (ours["event"], ours["address"], ours["size"]) == ("link up", "a:1", 3)
    assert (ours["level"], ours["logger"]) == ("info", "kvpushd.test")
    assert (theirs["event"], theirs["logger"]) == ("took 3 s", "asyncio")
    assert wrong["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert "the-token" not in json.dumps(wrong), "what variables held is nobody's"
    assert ours["timestamp"].endswith("Z")


def test_for_people_there_are_words() -> None:
    text = "\n".join(written("info", "human"))
    assert "link up" in text
    assert "address=a:1" in text
    assert "ZeroDivisionError" in text


def test_what_is_below_the_level_is_left_out() -> None:
    assert [json.loads(line)["event"] for line in written("error", "json")] == ["went wrong"]


class Notes:
    """A log that keeps what it is told, and a clock that is turned."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.now = 0.0

    def warning(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    def clock(self) -> float:
        return self.now


def test_equal_warnings_are_said_once_an_interval_with_the_number_left_out() -> None:
    notes = Notes()
    sparing = Sparing(notes, interval=10, clock=notes.clock)
    for notes.now in (0.0, 1.0, 9.0, 10.0, 11.0, 30.0):
        sparing.warning("a", "refused", peer="x")
    assert notes.said == [
        ("refused", {"peer": "x"}),
        ("refused", {"peer": "x", "left_out": 2}),
        ("refused", {"peer": "x", "left_out": 1}),
    ]


def test_different_warnings_do_not_hide_each_other_and_their_number_is_bounded() -> None:
    notes = Notes()
    sparing = Sparing(notes, interval=10, most_keys=2, clock=notes.clock)
    for key in ("a", "b", "a", "c", "a"):
        sparing.warning(key, key)
    # "a" was forgotten for "c", so that it is said again: too much rather than too little.
    assert [event for event, _ in notes.said] == ["a", "b", "c", "a"]
