# SPDX-License-Identifier: Apache-2.0
"""No engine survives who started it."""

import os
import select
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PARENT = """
import sys, threading
from pathlib import Path
from testing.clockwork import checkpoint
from testing.clockwork.harness import Harness
folder = Path(sys.argv[1])
model = checkpoint.write(folder / "model", checkpoint.Geometry())
harness = Harness(folder)
engine = harness.engine("orphan", model=model, block_size=16, tensor_parallel_size=2)
engine.ready(120)
print(*engine.inspect("testing.clockwork.probes:process_ids"), flush=True)
threading.Event().wait()
"""


def test_a_killed_parent_takes_its_engines_and_their_ranks_along(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        pidfds = [os.pidfd_open(pid) for pid in pids]
        parent.send_signal(signal.SIGKILL)
        for pidfd in pidfds:
            ended, _, _ = select.select([pidfd], [], [], 30)
            assert ended
            os.close(pidfd)
