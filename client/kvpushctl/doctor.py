# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl doctor`: what this host lacks, each in one line with the mend."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from kvpushctl.admin import connect
from kvpushctl.context import OutputOption, RuntimeDirOption, printer, runtime_dir
from kvpushctl.errors import CommandError
from kvpushctl.printer import Column, Output, field

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "kvpush"
NIXL_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `mend` says what to do where it is not ok."""

    check: str
    ok: bool
    found: str
    mend: str = ""


COLUMNS: tuple[Column, ...] = (
    field("CHECK", "check"),
    field("OK", "ok", lambda ok: "ok" if ok else "NO"),
    field("FOUND", "found"),
    field("MEND", "mend"),
)


def doctor(output: OutputOption = Output.TABLE, runtime: RuntimeDirOption = None) -> None:
    """Check what kvpushd and its engines need of this host; exit status 1 if something lacks."""
    findings = [memlock(), sealed_memory(), plugin(), nixl(), socket(runtime_dir(runtime))]
    printer(output).rows("checks", [asdict(one) for one in findings], COLUMNS, "")
    bad = [one.check for one in findings if not one.ok]
    if bad:
        raise CommandError(f"not well: {', '.join(bad)}")


def memlock() -> Finding:
    """Registering memory for RDMA pins it, and pinned memory is limited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", True, "unlimited")
    found = f"{soft / 2**20:.0f} MiB"
    if not Path("/sys/class/infiniband").is_dir():
        return Finding("memlock", True, f"{found}; no RDMA device here, so nothing is pinned")
    mend = "LimitMEMLOCK=infinity in the service, or `ulimit -l unlimited` before the daemon"
    return Finding("memlock", False, f"{found}, and there is an RDMA device", mend)


def sealed_memory() -> Finding:
    """CPU engines keep their KV cache in a sealed memfd."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fd = os.memfd_create("kvpush-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding("memfd", False, str(error), "allow memfd_create (a seccomp profile forbids it?)")
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return Finding("memfd", True, "can be made and sealed")
    except OSError as error:
        return Finding("memfd", False, f"cannot be sealed: {error}", "use a kernel with memfd seals (3.17)")
    finally:
        os.close(fd)


def plugin() -> Finding:
    """vLLM finds the connector through an entry point."""
    found = [point for point in entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN]
    if not found:
        mend = "install kvpushd into the environment that vLLM runs in"
        return Finding("vLLM plugin", False, f"no entry point {PLUGIN} in {PLUGIN_GROUP}", mend)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        mend = f"unset VLLM_PLUGINS, or add {PLUGIN} to it"
        return Finding("vLLM plugin", False, f"VLLM_PLUGINS={allowed} leaves it out", mend)
    vllm = "vLLM is here" if find_spec("vllm") else "vLLM is not in this environment"
    return Finding("vLLM plugin", True, f"{found[0].value}; {vllm}")


def nixl(python: Sequence[str] = (sys.executable,)) -> Finding:
    """The daemon's movers need NIXL. Tried in a child: a native library may abort the process."""
    code = "import nixl._api as api; api.nixl_agent('doctor', api.nixl_agent_config(backends=['UCX']))"
    mend = "pip install 'kvpushd[daemon]' on hosts that run the daemon"
    try:
        child = subprocess.run(
            [*python, "-c", code], capture_output=True, text=True, timeout=NIXL_SECONDS, check=False
        )
    except OSError as error:
        return Finding("NIXL", False, str(error), "let this user run that file, or ask as another")
    except subprocess.TimeoutExpired:
        return Finding(
            "NIXL", False, f"no agent within {NIXL_SECONDS} s", "check UCX_TLS and UCX_NET_DEVICES"
        )
    if child.returncode == 0:
        return Finding("NIXL", True, "an agent with UCX can be made")
    said = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
    return Finding("NIXL", False, said[-1], mend)


def socket(directory: Path) -> Finding:
    """Engines reach the daemon over sockets in its runtime directory."""
    try:
        with connect(directory) as admin:
            status = admin.status()
    except CommandError as error:
        what, _, mend = str(error).partition(": ")
        return Finding("daemon", False, what, mend)
    if status.ready:
        return Finding("daemon", True, f"{status.node} is ready in {directory}")
    return Finding("daemon", False, "; ".join(status.problems) or "not ready", "kvpushctl status; its log")
