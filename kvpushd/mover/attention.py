# SPDX-License-Identifier: Apache-2.0
"""How eagerly a mover looks for bytes: what the ledger knows of those that are due, as a level."""

from __future__ import annotations

from enum import IntEnum


class Attention(IntEnum):
    """The numbers of `kvpush.v1.Attention`."""

    IDLE = 1
    EXPECTING = 2
    FILLING = 3


# The longest wait for the next round, in seconds. A transport's bell cuts it short: then it is what a missed
# ring may cost.
_RUNG = {Attention.IDLE: 0.5, Attention.EXPECTING: 0.02, Attention.FILLING: 0.005}
# Without a bell the mover has to look.
_SILENT = {Attention.IDLE: 0.25, Attention.EXPECTING: 0.001, Attention.FILLING: 0.00025}


def longest_wait(attention: Attention, bell: bool) -> float:
    """Seconds until the next round is due at a level, where there is a bell or none."""
    return (_RUNG if bell else _SILENT)[attention]


RECEIVING = (50e-6, 2e-3)
"""Seconds to rest after a round that the bell rang for, at least and at most."""
SENDING = (500e-6, 2e-3)
"""The same between two rounds while writes are under way and nothing rings: the bell does not for all that a
sender has to do, since UCX queues what a socket did not take."""

# A round costs some tens of microseconds where it finds nothing.
_SHORT, _LONG = 100e-6, 400e-6


class Rest:
    """How long a mover leaves its agents alone while bytes come or go, whatever rings meanwhile.

    A round takes all that has come. On a slow link that is little, and rounds would cost more than bytes:
    then rests grow, to what a socket holds; on a fast one they shrink. At 176 MB/s rests of 2 ms moved the
    same bytes as those of 0.5 ms for a fifth less CPU; over loopback, naps of 20 and of 300 us moved the same
    bytes per second, and spinning fewer.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most
        self.seconds = least

    def after(self, worked: float) -> None:
        """A round took so many seconds, and bytes come or go."""
        if worked < _SHORT:
            self.seconds = min(self.seconds * 1.25, self._most)
        elif worked > _LONG:
            self.seconds = max(self.seconds / 2, self._least)

    def over(self) -> None:
        """None come or go: who begins shall not wait."""
        self.seconds = self._least
