# SPDX-License-Identifier: Apache-2.0
"""Where the sockets of this node's kvpushd are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "KVPUSHD_RUNTIME_DIR"
SYSTEM = Path("/run/kvpushd")


def default_runtime_dir(env: Mapping[str, str], system: Path = SYSTEM) -> Path:
    """The place that a daemon takes by itself: the system's if it is there, else the user's, else /tmp."""
    if given := env.get(VARIABLE):
        return Path(given)
    if system.exists():
        return system
    if user := env.get("XDG_RUNTIME_DIR"):
        return Path(user) / "kvpushd"
    return Path(f"/tmp/kvpushd-{os.getuid()}")
