# SPDX-License-Identifier: Apache-2.0
"""What is asked of the host where nobody says."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path


def runtime_dir(env: Mapping[str, str]) -> Path:
    """Where the sockets are if nobody says: systemd's choice, the system's place, the user's, /tmp."""
    if given := env.get("RUNTIME_DIRECTORY"):
        return Path(given.split(":")[0])
    system = Path("/run/kvpushd")
    if os.access(system if system.exists() else system.parent, os.W_OK):
        return system
    if user := env.get("XDG_RUNTIME_DIR"):
        return Path(user) / "kvpushd"
    return Path(f"/tmp/kvpushd-{os.getuid()}")


def advertised_host(peer_host: str) -> str:
    """Where others reach this node if nobody says: where it listens, else its address on the first route."""
    if peer_host not in ("", "0.0.0.0", "::"):
        return peer_host
    # Connecting a datagram socket sends nothing; it asks the kernel which address a packet would carry.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asked:
                asked.connect((target, 9))
                return str(asked.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
