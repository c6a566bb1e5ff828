# SPDX-License-Identifier: Apache-2.0
"""A node to look at, and the program that looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpushctl.__main__ import main
from tests.kvpushctl.admin_server import AdminServer, Content, serve

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its stdout as JSON."""
        return json.loads(self.out)


Ctl = Callable[..., Ran]


@pytest.fixture
def ctl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Runs a kvpushctl command line on a runtime directory of its own."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as exited:
            main([*arguments, "--runtime-dir", str(tmp_path)])
        said = capsys.readouterr()
        return Ran(int(exited.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def node(tmp_path: Path) -> Iterator[AdminServer]:
    """A node whose content a test fills."""
    server = AdminServer(Content())
    with serve(server, tmp_path):
        yield server
