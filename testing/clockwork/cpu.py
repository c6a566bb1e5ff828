# SPDX-License-Identifier: Apache-2.0
"""What a CPU engine must ask its kernel for."""

import ctypes
import platform
import sys

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def allow_amx() -> bool:
    """Ask for AMX tile data for this process; True if granted.

    vLLM's CPU attention uses AMX for bf16 without asking, and is killed by SIGILL. Asking where there is no
    AMX does nothing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
