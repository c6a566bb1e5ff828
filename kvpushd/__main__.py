# SPDX-License-Identifier: Apache-2.0
"""`kvpushd`: reads the configuration, then runs the daemon."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence

from kvpushd import config, logs
from kvpushd.errors import ConfigError
from kvpushd.settings import Settings

LEAST_FILES = 64
"""Open files without which no daemon starts: gRPC and UCX crash where they lack one, and say nothing."""


def main(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    run: Callable[[Settings], int] | None = None,
) -> int:
    """Runs the daemon, or what `run` is given for it, until stopped; 2 = the configuration is wrong."""
    try:
        loaded = config.read(sys.argv[1:] if argv is None else argv, dict(os.environ) if env is None else env)
    except config.ConfigErrors as error:
        for line in error.lines:
            sys.stderr.write(f"kvpushd: {line}\n")
        return 2
    if loaded.check_only:
        return _check(loaded)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < LEAST_FILES:
        sys.stderr.write(
            f"kvpushd: it may open {files} files and needs {LEAST_FILES} to start, some for each engine and "
            "peer after that: raise LimitNOFILE, or `ulimit -n`\n"
        )
        return 1
    logs.set_up(loaded.settings.log.level, loaded.settings.log.format, sys.stderr)
    # gRPC's core writes to stderr in a form of its own; what it knows, its errors say to us too. It reads
    # this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if run is None:
        # Only now: the daemon's imports (NIXL, gRPC) take their time and may log.
        from kvpushd import daemon

        run = daemon.run
    return run(loaded.settings)


def _check(loaded: config.Loaded) -> int:
    """What is in force, unless the files that it names would not do."""
    from kvpushd.rpc import tls  # gRPC's import takes its time

    settings = loaded.settings
    try:
        security = tls.choose(
            settings.tls,
            insecure=settings.insecure_peers,
            allowed=settings.allowed_peers,
            node=settings.node,
            host=settings.advertised_host,
        )
    except ConfigError as error:
        sys.stderr.write(f"kvpushd: {error}\n")
        return 2
    for doubt in security.doubts():
        sys.stderr.write(f"kvpushd: warning: {doubt}\n")
    sys.stdout.write(config.describe(loaded) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
