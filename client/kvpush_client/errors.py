# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between an engine and its daemon, as a tree.

    KvpushClientError
    ├── DaemonUnreachable   the daemon does not answer
    └── DaemonRefused       it answered no; carries the reason

Once a session is up, nothing raises: what goes wrong with a transfer is an event with a fault.
"""

from __future__ import annotations

from kvpush_client.events import Fault, Reason


class KvpushClientError(Exception):
    """Root of all errors that the client raises on purpose."""


class DaemonUnreachable(KvpushClientError):
    """The daemon does not answer; says where it was looked for."""


class DaemonRefused(KvpushClientError):
    """The daemon answered no."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(str(Fault(reason, detail)))
        self.reason = reason
        self.detail = detail
