# SPDX-License-Identifier: Apache-2.0
"""Sends a prompt's two legs: straight to both engines, or as a router's client."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable

from testing.chaos.holds import REACH
from testing.chaos.scenario import Cast, Scenario
from testing.chaos.stage import D, Legs, Stage, body_of, wait_for

ANSWERED = 15.0
"""Seconds that a router's client waits for its answer."""


class Asking:
    """`send` sends both legs by the way that the scenario's cast has."""

    def __init__(self, stage: Stage, scenario: Scenario) -> None:
        self._stage = stage
        self._scenario = scenario
        self._client: threading.Thread | None = None
        self._answered: list[list[int] | None] = []

    def send(self, legs: Legs) -> None:
        """Returns as both engines have them. Raises TimeoutError where a router does not send them on."""
        if self._scenario.cast is Cast.ROUTER:
            self._through_router(legs)
        else:
            self._at_once(legs)

    @property
    def asked(self) -> bool:
        """Whether a router's client was among those who asked."""
        return self._client is not None

    def client_got(self) -> list[int] | None:
        """What a router's client got, once it has; None where that was no answer."""
        if self._client is not None:
            self._client.join(ANSWERED)
        return self._answered[0] if self._answered else None

    def _at_once(self, legs: Legs) -> None:
        legs_in_order: list[Callable[[Legs], None]] = [self._stage.send_p, self._stage.send_d]
        if self._scenario.d_first:
            legs_in_order.reverse()
        for send in legs_in_order:
            send(legs)

    def _through_router(self, legs: Legs) -> None:
        front = self._stage.front
        assert front is not None
        before = len(front.came)
        self._answered = []
        self._client = threading.Thread(target=self._ask, args=(body_of(legs), self._answered), daemon=True)
        self._client.start()
        wait_for("both legs come", lambda: len(front.came) >= before + 2, REACH)
        for came in front.came[before:]:
            legs.transfer_id = bytes.fromhex(came.params["transfer_id"])
            legs.sent[came.engine] = came.at
            if came.engine == D:
                legs.d = came.request
            else:
                legs.p = came.request

    def _ask(self, body: bytes, answered: list[list[int] | None]) -> None:
        url = f"http://127.0.0.1:{self._stage.router_port}/v1/completions"
        call = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(call, timeout=ANSWERED) as found:
                answered.append(json.load(found)["choices"][0]["token_ids"])
        except (OSError, ValueError, KeyError):
            answered.append(None)
