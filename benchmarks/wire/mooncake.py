# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine over TCP, in an environment of its own.

Of its wheels, the plain one wants CUDA's runtime library, so the one without CUDA is installed. Both want
libibverbs, whatever the transport: where the machine has none, Debian's packages are unpacked beside the
environment, not installed.
"""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.child import Child
from benchmarks.wire.case import Case
from benchmarks.wire.contender import WrongBytes
from benchmarks.wire.memory import Memory

PACKAGE = "mooncake-transfer-engine-non-cuda"
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
HOME = Path(__file__).parents[2] / ".venv-mooncake"
INSTALL_SECONDS = 240


class Unavailable(RuntimeError):
    """It can't be made to run here; says what was tried."""


class Mooncake:
    """Two processes. `batch_transfer_sync_write`, in batches of what its queue takes."""

    name = "Mooncake"

    def __init__(self, memory: Memory, folder: Path, say: Callable[[str], None]) -> None:
        """Installs it where that has not been done. Raises Unavailable."""
        _install(folder / "mooncake-install.log", say)
        libraries = sorted({str(found.parent) for found in (HOME / "debian").rglob("*.so.*")})
        script = str(Path(__file__).with_name("mooncake_end.py"))
        self._ends = [
            Child(
                [str(HOME / "bin" / "python"), "-P", script, path],
                folder / f"mooncake-{role}.log",
                {"LD_LIBRARY_PATH": ":".join(libraries), "OPENBLAS_NUM_THREADS": "1"},
            )
            for role, path in memory.paths.items()
        ]
        self._sender, self._receiver = self._ends
        try:
            self._sender.hear()
            self._sender.ask("meet", **self._receiver.hear())
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"{PACKAGE} is installed and does not start: {error}") from error

    @property
    def pids(self) -> Sequence[int]:
        """Both."""
        return [end.pid for end in self._ends]

    def turn(self, case: Case) -> float:
        """Writes a pool's worth. Raises RuntimeError where it refuses."""
        answer = self._sender.ask("write", shape=case.shape, run=case.run)
        if answer["status"] != 0:
            raise RuntimeError(f"Mooncake, {case.name}: its write ended with status {answer['status']}")
        return float(answer["seconds"])

    def check(self, case: Case) -> None:
        """Raises WrongBytes."""
        if not self._receiver.ask("check", shape=case.shape, run=case.run)["right"]:
            raise WrongBytes(f"Mooncake, {case.name}: the target does not hold what was sent")

    def close(self) -> None:
        """Ends both."""
        for end in self._ends:
            end.close()


def _install(log: Path, say: Callable[[str], None]) -> None:
    done = HOME / "installed"
    if done.exists():
        return
    say(f"installing {PACKAGE} into {HOME.name}")
    shutil.rmtree(HOME, ignore_errors=True)
    python = str(HOME / "bin" / "python")
    commands = [
        ([sys.executable, "-m", "venv", str(HOME)], None),
        ([python, "-m", "pip", "install", "--quiet", PACKAGE, "numpy"], None),
    ]
    if ctypes.util.find_library("ibverbs") is None:
        # Without verbs on the machine: unpacked here, so that nothing outside of this folder changes.
        packages = HOME / "packages"
        commands.append((["apt-get", "download", *LIBRARIES], packages))
        commands.append(
            (["sh", "-c", f"for p in *.deb; do dpkg-deb -x $p '{HOME / 'debian'}'; done"], packages)
        )
    for command, folder in commands:
        if folder is not None:
            folder.mkdir(exist_ok=True)
        try:
            with log.open("ab") as output:
                subprocess.run(
                    command, cwd=folder, check=True, stdout=output, stderr=output, timeout=INSTALL_SECONDS
                )
        except (OSError, subprocess.SubprocessError) as error:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
            raise Unavailable(f"{PACKAGE} can't be installed: {error}; {last[0]:.200}") from error
    done.touch()
