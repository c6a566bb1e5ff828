# SPDX-License-Identifier: Apache-2.0
"""How a command ends that does not end well: one line on stderr, and a status that scripts can test."""

from __future__ import annotations

from typing import ClassVar


class CommandError(Exception):
    """The command failed; the message is one line and says what to do next."""

    status: ClassVar[int] = 1


class DaemonUnreachable(CommandError):
    """No kvpushd answers."""

    status = 3
