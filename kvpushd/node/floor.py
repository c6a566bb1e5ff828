# SPDX-License-Identifier: Apache-2.0
"""The floor of links' rates: a transport that fell back to a slower one answers all requests all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from kvpushd.core.words import LinkId

LOOK = 5.0
"""Seconds between looks: long against the transfers that a rate is learned from."""


class Floor:
    """Says which links are slower than they should be: to whoever asks, and once each to the log."""

    def __init__(
        self,
        bytes_per_second: int,
        links: Callable[[], Iterable[LinkId]],
        rate: Callable[[LinkId], float],
        lanes: Callable[[], str],
    ) -> None:
        """`links` are those on which this node sends, `rate` is what one carries in bytes per second, 0 while
        that is not known, `lanes` what carries them. A floor of 0 is none."""
        self._rate = rate
        self._floor = bytes_per_second
        self._links = links
        self._lanes = lanes
        self._warned: set[LinkId] = set()
        self._log = structlog.get_logger("kvpushd.floor")

    def is_undercut_by(self, link: LinkId) -> bool:
        """Whether a link is known to carry less."""
        return 0 < self._rate(link) < self._floor

    def look(self) -> None:
        """Warns of the links that fell below since the last look, and says which came back."""
        links = set(self._links())
        below = {link for link in links if self.is_undercut_by(link)}
        for link in sorted(below - self._warned):
            rate = int(self._rate(link))
            self._log.warning(
                "link below its floor",
                link=link,
                bytes_per_second=rate,
                floor=self._floor,
                lanes=self._lanes(),
            )
        for link in sorted((self._warned & links) - below):
            self._log.info("link above its floor again", link=link)
        self._warned = below

    async def watch(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.look()
