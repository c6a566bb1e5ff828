# SPDX-License-Identifier: Apache-2.0
"""Configuration files, environments and flags as nobody should write them: settings, or reasons."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpushd.config import ConfigErrors, describe, read
from kvpushd.settings import options

CORPUS = sorted((Path(__file__).parent / "corpus" / "config").glob("*.toml"))

FIELDS = [option.field for option in options()]
VARIABLES = [option.variable for option in options()]
FLAGS = [option.flag for option in options()]
WORDS = st.sampled_from(
    [
        "",
        "0",
        "-1",
        "1e999",
        "nan",
        "inf",
        "true",
        "0660",
        "9999",
        "1.2.3s",
        ".s",
        "5 m",
        "1TiB",
        "64MiB",
        "/",
        "*",
        "a,b",
        "=",
        "A=1,,B",
        "\x00",
        "\ud800",
        "[",
        "{}",
        "localhost",
        "::",
        "9999e9",
    ]
)
TOML_VALUES = st.sampled_from(
    [
        "",
        "1",
        "-1",
        "1e400",
        "nan",
        "[]",
        "[1, 2]",
        "{}",
        "{a = 1}",
        '"0660"',
        "0o660",
        '"x"',
        "true",
        '"30s"',
        "1979-05-27",
        "07:32:00",
        "'",
        '"\\u0000"',
        '["a", 1]',
        '"."',
        '".ms"',
        "999999999999999999999999999999",
    ]
)
LINES = st.one_of(
    st.builds(
        lambda field, value: f"{field} = {value}", st.sampled_from([*FIELDS, "nobody", '"']), TOML_VALUES
    ),
    st.sampled_from(["[tls]", "[limits]", "[[ucx]]", "[", "[ucx.env]", "node"]),
    st.text(max_size=20),
)


def judge(argv: list[str], env: dict[str, str]) -> None:
    """Settings that can be shown, or one line for each thing that is wrong."""
    try:
        loaded = read(argv, env)
    except ConfigErrors as error:
        lines = list(error.lines)
    else:
        lines = describe(loaded).splitlines()
    assert lines
    for line in lines:
        assert line.strip()
        assert "\n" not in line


def written(content: bytes, env: dict[str, str]) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        judge(["--config", file.name], env)


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.stem)
def test_what_was_found_once_is_borne(entry: Path) -> None:
    written(entry.read_bytes(), {})


@settings(derandomize=True, database=None, max_examples=300)
@given(st.lists(LINES, max_size=6), st.dictionaries(st.sampled_from(VARIABLES), WORDS, max_size=4))
def test_any_file_and_environment_give_settings_or_reasons(lines: list[str], env: dict[str, str]) -> None:
    written("\n".join(lines).encode("utf-8", "surrogatepass"), env)


@settings(derandomize=True, database=None, max_examples=300)
@given(st.dictionaries(st.sampled_from(FLAGS), WORDS, max_size=4))
def test_any_flags_give_settings_or_reasons(flags: dict[str, Any]) -> None:
    judge([f"{flag}={value}" for flag, value in flags.items()], {})


@settings(derandomize=True, database=None, max_examples=100)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_file_or_are_refused(content: bytes) -> None:
    written(content, {})


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(st.lists(LINES, max_size=8), st.dictionaries(st.sampled_from(VARIABLES), WORDS, max_size=6))
def test_a_lot_of_files_and_environments_give_settings_or_reasons(
    lines: list[str], env: dict[str, str]
) -> None:
    written("\n".join(lines).encode("utf-8", "surrogatepass"), env)


def test_the_daemon_itself_ends_with_lines_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('lease = "never"\n[limits]\nhistory = -1\n')
    command = [sys.executable, "-m", "kvpushd", "--config", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 2
    assert all(line.startswith("kvpushd: ") for line in ended.stderr.splitlines())
