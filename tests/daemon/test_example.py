# SPDX-License-Identifier: Apache-2.0
"""The example of docs/client.md, as somebody who copies it runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testing.node import Node

pytestmark = pytest.mark.nixl

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"


def test_the_example_of_the_client_library_moves_its_bytes(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    with Node("own", tmp_path) as node:
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "KVPUSHD_RUNTIME_DIR": str(node.runtime_dir)},
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("16384 bytes in ")
