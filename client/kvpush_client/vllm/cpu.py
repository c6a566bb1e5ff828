# SPDX-License-Identifier: Apache-2.0
"""What an engine on CPUs must ask its kernel for."""

from __future__ import annotations

import ctypes
import platform
import sys

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def allow_amx() -> bool:
    """Ask for AMX tile data for this process and what it forks; True if granted. Harmless to repeat.

    vLLM's CPU attention uses AMX tiles for bf16 without asking. Other code of the process usually has asked,
    but an engine that only decodes reaches the kernel first, and is killed by SIGILL. Where there is no AMX
    nothing happens.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
