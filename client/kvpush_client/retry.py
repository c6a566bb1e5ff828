# SPDX-License-Identifier: Apache-2.0
"""When a session tries again, and what it says of its attempts."""

from __future__ import annotations

import logging
import threading

from kvpush_client.errors import DaemonRefused, KvpushClientError

_UNREACHABLE = (0.05, 1.0)  # seconds: first and longest wait before the next try
_REFUSED = (1.0, 5.0)

_log = logging.getLogger(__name__)


class Retries:
    """Waits between attempts, longer and longer, until `closing` is set; warns of each new trouble once."""

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._delay = 0.0
        self._said = ""

    def wait(self, connected: bool, trouble: KvpushClientError) -> None:
        """After an attempt that `trouble` ended, whether or not it had come to a connection."""
        first, longest = _REFUSED if isinstance(trouble, DaemonRefused) else _UNREACHABLE
        self._delay = first if connected else min(max(first, 2 * self._delay), longest)
        # An engine closes one session after the other, and the first one's end ends those of the others: that
        # is no news, as they are closed before the wait is over.
        if self._closing.wait(self._delay if connected else 0.0):
            return
        if connected or str(trouble) != self._said:
            self._said = str(trouble)
            _log.warning("kvpushd: %s; trying again", trouble)
        if not connected:
            self._closing.wait(self._delay)
