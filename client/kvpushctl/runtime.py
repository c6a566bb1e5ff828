# SPDX-License-Identifier: Apache-2.0
"""Where the sockets of this node's kvpushd are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "KVPUSHD_RUNTIME_DIR"
SYSTEM = Path("/run/kvpushd")


def default_runtime_dir(env: Mapping[str, str], system: Path = SYSTEM) -> Path:
    """Where a daemon of this user or of the system serves: the first place that exists, else the system's,
    which is not there before its daemon's first start."""
    if given := env.get(VARIABLE):
        return Path(given)
    places = [system, Path(f"/tmp/kvpushd-{os.getuid()}")]
    if user := env.get("XDG_RUNTIME_DIR"):
        places.insert(1, Path(user) / "kvpushd")
    # Not Path.exists: that raises where another user's directory is in the way.
    return next((place for place in places if os.path.exists(place)), system)
