# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvpushctl.printer import Output, Printer, field
from kvpushctl.runtime import default_runtime_dir
from kvpushctl.units import duration_ms, moment, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98304, "96.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_a_size_has_a_binary_unit(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "-"),
        (0.42, "0.4 ms"),
        (82, "82 ms"),
        (4100, "4.1 s"),
        (185_000, "3 min 5 s"),
        (7_620_000, "2 h 7 min"),
        (273_600_000, "3 d 4 h"),
    ],
)
def test_a_duration_has_a_fitting_unit(milliseconds: float | None, text: str) -> None:
    assert duration_ms(milliseconds) == text


def test_a_moment_that_has_not_come_is_a_dash() -> None:
    assert moment(0) == "-"
    assert moment(1_800_000_000_000_000_000) == "2027-01-15 08:00:00Z"


def test_the_runtime_directory_is_where_a_daemon_is_or_the_systems(tmp_path: Path) -> None:
    system = tmp_path / "run" / "kvpushd"
    user = {"XDG_RUNTIME_DIR": str(tmp_path / "user")}
    assert default_runtime_dir({**user, "KVPUSHD_RUNTIME_DIR": "/x"}, system) == Path("/x")
    assert default_runtime_dir(user, system) == system
    (tmp_path / "user" / "kvpushd").mkdir(parents=True)
    assert default_runtime_dir(user, system) == tmp_path / "user" / "kvpushd"
    system.mkdir(parents=True)
    assert default_runtime_dir(user, system) == system


def test_a_table_is_never_cut_however_narrow_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    columns = [field(f"COLUMN {number}", "text") for number in range(20)]
    Printer(Output.TABLE, out, io.StringIO()).rows("things", [{"text": "x" * 30}], columns, "")
    assert out.getvalue().count("x" * 30) == 20
