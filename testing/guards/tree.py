# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree that tests can run in while a guard is missing from it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from testing.guards.guard import Guard

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = (".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis", "build", "dist", "results")


class Tree:
    """The copy. What runs in it imports it, and so does whatever that starts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._changes = 0

    @classmethod
    def copy(cls, to: Path) -> Tree:
        """Copies this project's files, without what was built or installed."""
        shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*LEFT_BEHIND), symlinks=True)
        venv = ROOT / ".venv"
        if venv.exists():
            (to / ".venv").symlink_to(venv.resolve())
        return cls(to)

    @property
    def environment(self) -> Mapping[str, str]:
        """For processes that are to use the copy, whatever is installed."""
        return {**os.environ, "PYTHONPATH": f"{self.root}:{self.root / 'client'}"}

    @contextlib.contextmanager
    def without(self, guard: Guard) -> Iterator[None]:
        """The guard is missing meanwhile. Raises ValueError where it is not there."""
        file = self.root / guard.file
        whole = file.read_text()
        self._write(file, guard.taken_out(whole))
        try:
            yield
        finally:
            self._write(file, whole)

    def _write(self, file: Path, text: str) -> None:
        # Python takes compiled code for current where the source's second and size are: no two versions share
        # a second, whatever the clock says.
        self._changes += 1
        second = int(file.stat().st_mtime) + self._changes
        file.write_text(text)
        os.utime(file, (second, second))
