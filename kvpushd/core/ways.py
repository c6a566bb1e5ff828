# SPDX-License-Identifier: Apache-2.0
"""The ways by which bytes come in: routes, and the inlets at their ends.

A route leads from one sending engine, over a link, into the pools of one engine of ours. All routes of the
same link and engine end in one inlet, i.e. one receiving agent: destroying it is the last rung of the fence
ladder, and takes all of them down.
"""

from __future__ import annotations

from enum import Enum

from kvpushd.core.engines import is_local
from kvpushd.core.words import Incarnation, LinkId, ReceiverKey

RouteKey = tuple[LinkId, Incarnation, str]
InletKey = ReceiverKey


class Way(Enum):
    """Where a route stands."""

    DOWN = "down"
    REACHING = "reaching"
    UP = "up"


class Ways:
    """All routes and inlets of the node."""

    def __init__(self) -> None:
        self._routes: dict[RouteKey, Way] = {}
        """Those that are not down."""
        self._closing: dict[InletKey, bool] = {}
        """Inlets that exist or are being made; True from the order to close on."""

    def get(self, route: RouteKey) -> Way:
        """Where a route stands."""
        return self._routes.get(route, Way.DOWN)

    def may_reach(self, route: RouteKey) -> bool:
        """Whether a route can be opened now: it is down, and its inlet is not being closed."""
        return self.get(route) is Way.DOWN and not self.is_closing(route[:2])

    def reach(self, route: RouteKey) -> None:
        """A route is being opened."""
        self._routes[route] = Way.REACHING
        if not is_local(route[0]):
            self._closing.setdefault(route[:2], False)

    def reached(self, route: RouteKey, up: bool) -> bool:
        """It is open, or could not be; False where nobody asked."""
        if self.get(route) is not Way.REACHING:
            return False
        if up:
            self._routes[route] = Way.UP
        else:
            del self._routes[route]
        return True

    def is_closing(self, inlet: InletKey) -> bool:
        """Whether an inlet is being closed."""
        return self._closing.get(inlet, False)

    def close(self, inlet: InletKey) -> bool:
        """An inlet is to be closed, and its routes are down; False where there is none, or it was said."""
        self._down(inlet)
        if self._closing.get(inlet) is not False:
            return False
        self._closing[inlet] = True
        return True

    def closed(self, inlet: InletKey) -> bool:
        """The answer to the order; False where none was given: it then speaks of an inlet before this one."""
        if not self.is_closing(inlet):
            return False
        del self._closing[inlet]
        return True

    def died(self, incarnation: Incarnation) -> list[InletKey]:
        """All inlets of an engine are gone with their process. Those that were to be closed stay so until the
        answer has come, for it could not be told from that to a later order."""
        mine = self.inlets(incarnation=incarnation)
        for inlet in mine:
            self._down(inlet)
            if not self.is_closing(inlet):
                del self._closing[inlet]
        return mine

    def _down(self, inlet: InletKey) -> None:
        for route in [route for route in self._routes if route[:2] == inlet]:
            del self._routes[route]

    def used_on(self, link: LinkId) -> list[RouteKey]:
        """Routes of a link that are up or being opened."""
        return [route for route in self._routes if route[0] == link]

    def inlets(self, link: LinkId | None = None, incarnation: Incarnation | None = None) -> list[InletKey]:
        """Inlets that exist, of a link or of an engine."""
        return [i for i in self._closing if link in (None, i[0]) and incarnation in (None, i[1])]

    def forget(self, incarnation: Incarnation) -> list[RouteKey]:
        """Drops the routes of an engine; returns them."""
        mine = [route for route in self._routes if route[1] == incarnation]
        for route in mine:
            del self._routes[route]
        return mine
