# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl`: see --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvpushctl.app import build
from kvpushctl.errors import CommandError


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command line and exits: 0 ok, 1 failed, 2 wrong usage, 3 no daemon answers."""
    try:
        build()(None if arguments is None else list(arguments))
    except CommandError as error:
        sys.stderr.write(f"kvpushctl: {error}\n")
        sys.exit(error.status)
    except BrokenPipeError:
        # `kvpushctl transfers | head`: whoever read has enough.
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
