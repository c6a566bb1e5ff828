# SPDX-License-Identifier: Apache-2.0
"""The whole demo, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SECONDS = 540
MARK = b"KVPUSH_DEMO="

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a demo keeps its files: pytest's own folders are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as made:
        yield Path(made)


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that keeps its files below `folder`."""
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'client'}:{REPOSITORY}", "TMPDIR": str(folder)}
    argv = [sys.executable, "-m", "kvpushctl", "demo", *arguments]
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def left_behind(folder: Path) -> list[str]:
    """Files in `folder`, and processes of a demo that kept its files there."""
    left = [str(path) for path in folder.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue  # it has just ended
        if MARK + str(folder).encode() in environment:
            left.append(str(process))
    return left


def test_every_output_is_the_plain_engines_and_every_position_was_received(folder: Path) -> None:
    with demo(folder, "--output", "json") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["verdict"] == "identical"
    assert found["leaks"] == {"blocks": 0, "reservations": 0, "handoffs": 0}
    prompts = found["prompts"]
    assert [one["prompt_tokens"] for one in prompts][:5] == [1, 2, 31, 32, 33]
    assert all(one["output_equal"] and one["recomputed_tokens"] == 0 for one in prompts)
    (long,) = [one for one in prompts if one["prompt_tokens"] == 3000]
    assert long["external_tokens"] == 2999
    assert long["bytes_pushed"] >= 2999 * found["engine"]["kv_bytes_per_token"]
    assert long["chunks_before_seal"] > 0
    assert set(long["phases_ms"]) == {"reserve", "announce", "first_byte", "seal", "landed", "first_token"}
    assert left_behind(folder) == []


@pytest.mark.long
def test_spoiled_kv_shows_in_the_outputs(folder: Path) -> None:
    with demo(folder, "--corrupt", "--output", "json") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, err
    found = json.loads(out)
    assert found["verdict"] == "different"
    assert any(one["external_tokens"] and not one["output_equal"] for one in found["prompts"])
    assert all(one["output_equal"] for one in found["prompts"][:4])
    assert left_behind(folder) == []


def test_interrupted_while_engines_start_it_leaves_nothing_behind(folder: Path) -> None:
    with demo(folder) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "decode engine" in line:
                break
        assert left_behind(folder) != []
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert out == ""
    assert left_behind(folder) == []
