# SPDX-License-Identifier: Apache-2.0
"""Slows the progress thread of NIXL agents that an engine makes."""

from typing import Any

POLL_MICROSECONDS = 1000


def nixl() -> None:
    """Agents made in this process from now on poll every millisecond instead of spinning.

    NIXL's Python API writes 0 for the delay and offers no other; only its native configuration has one.
    """
    from nixl._api import nixlBind

    native: Any = nixlBind.nixlAgentConfig

    class Slowed(native):  # type: ignore[misc]
        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            return int(native.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            native.pthrDelay.__set__(self, POLL_MICROSECONDS)

    nixlBind.nixlAgentConfig = Slowed
