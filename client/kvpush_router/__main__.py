# SPDX-License-Identifier: Apache-2.0
"""`kvpush-router`: see --help."""

from __future__ import annotations

import sys

from kvpush_router.flags import Flags, parse


def serve(flags: Flags) -> None:
    """Serves until SIGTERM or SIGINT."""
    from aiohttp import web

    from kvpush_router.engine import Fleet
    from kvpush_router.journal import stderr_journal
    from kvpush_router.proxy import Proxy

    journal = stderr_journal()
    proxy = Proxy(Fleet(flags.prefill), Fleet(flags.decode), journal)
    journal.note(
        "serving",
        address=f"http://{flags.host}:{flags.port}",
        prefill=[spec.url for spec in flags.prefill],
        decode=[spec.url for spec in flags.decode],
    )
    web.run_app(
        proxy.app(),
        host=flags.host,
        port=flags.port,
        handler_cancellation=True,
        print=None,
        access_log=None,
        shutdown_timeout=5,
    )


def main() -> None:
    """The entry point. Exit status: 0 stopped by a signal, 1 failed, 2 wrong flags."""
    flags = parse()
    try:
        serve(flags)
    except ImportError as error:
        sys.exit(f"kvpush-router: {error.name} is missing: pip install 'kvpushd[router]'")
    except OSError as error:
        sys.exit(f"kvpush-router: cannot listen on {flags.host}:{flags.port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
