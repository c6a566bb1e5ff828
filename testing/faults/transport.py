# SPDX-License-Identifier: Apache-2.0
"""Faults at each call of a carrier's or transport's contract, and at the completions it gives out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvpush_client.events import Fault, Reason
from kvpushd.errors import KvpushError, TransportFailed
from kvpushd.mover.transport.base import Carrier, Completion, Handles, Region, Transport, Write
from testing.faults.catalog import COMPLETION
from testing.faults.points import Broken, Lane, Points
from testing.faults.rules import Act, Rule

# Ids of the second writes of a repeat; no daemon gives them out.
TWICE = 1 << 62

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Late:
    """A completion that is held back: until a time, or until its rule is taken away."""

    completion: Completion
    rule: Rule
    due: float


class FaultyCarrier:
    """Carries by `inner`. Its calls are the points "NAME.METHOD"; `poll` gives out "NAME.completion"s.

    A call that fails raises TransportFailed where its contract allows it, and else is not made. A write that
    is posted twice lands twice, and then ends once.
    """

    def __init__(self, inner: Carrier, points: Points, family: str) -> None:
        self._inner = inner
        self._points = points
        self._family = family
        self._posts: Lane[Write] = Lane()
        self._done: Lane[Completion] = Lane()
        self._ended: list[Completion] = []
        self._late: list[_Late] = []
        self._lost: dict[int, int] = {}
        """Writes that never end, and their outlets."""
        self._outlets: dict[int, int] = {}
        """Of writes whose completion has not been given out."""
        self._doubled: dict[int, Completion | None] = {}

    @property
    def name(self) -> str:
        """The inner carrier's."""
        return self._inner.name

    def register(self, region: Region) -> None:
        """As the inner carrier."""
        self._call("register", lambda: self._inner.register(region), None)

    def deregister(self, pool_id: bytes) -> None:
        """As the inner carrier."""
        self._quietly("deregister", lambda: self._inner.deregister(pool_id))

    def post(self, write: Write) -> None:
        """As the inner carrier. What fails ends by `poll`; what is dropped never ends."""
        self._begin("post", self._inner.post, self._posts, write)

    def inspect(self, write: Write) -> None:
        """The same of an inspection."""
        self._begin("inspect", self._inner.inspect, Lane(), write)

    def _begin(self, method: str, call: Callable[[Write], None], lane: Lane[Write], write: Write) -> None:
        self._outlets[write.write_id] = write.outlet_id
        rule = self._points.strikes(f"{self._family}.{method}", "before")
        try:
            self._suffer(rule)
        except Broken as error:
            self._ended.append(Completion(write.write_id, Fault(Reason.TRANSPORT_FAILED, str(error))))
            return
        self._lost[write.write_id] = write.outlet_id
        for passed in lane.passes(write, rule, self._twin):
            call(passed)
            self._lost.pop(passed.write_id, None)
        after = self._points.strikes(f"{self._family}.{method}", "after")
        try:
            self._suffer(after)
        except Broken:
            return  # it was begun, and its end will say what came of it

    def _twin(self, write: Write) -> Write:
        self._doubled[write.write_id] = None
        return replace(write, write_id=write.write_id + TWICE)

    def poll(self) -> list[Completion]:
        """As the inner carrier."""
        ended, self._ended = self._ended, []
        self._quietly("poll", lambda: ended.extend(self._inner.poll()))
        now = time.monotonic()
        given = [late.completion for late in self._late if not self._is_held(late, now)]
        self._late = [late for late in self._late if self._is_held(late, now)]
        for completion in ended:
            given.extend(self._complete(completion, now))
        return given

    def _is_held(self, late: _Late, now: float) -> bool:
        return self._points.holds(late.rule) if late.rule.act is Act.HANG else now < late.due

    def _complete(self, completion: Completion, now: float) -> list[Completion]:
        write_id = completion.write_id % TWICE
        if write_id in self._doubled:
            other = self._doubled[write_id]
            if other is None:
                self._doubled[write_id] = completion
                return []
            del self._doubled[write_id]
            completion = Completion(write_id, completion.fault or other.fault)
        rule = self._points.strikes(f"{self._family}.{COMPLETION}", "before")
        if rule is not None and rule.act in (Act.HANG, Act.DELAY):
            self._late.append(_Late(completion, rule, now + rule.seconds))
            return []
        try:
            self._suffer(rule)
        except Broken as error:
            return [Completion(write_id, Fault(Reason.TRANSPORT_FAILED, str(error)))]
        passed = list(self._done.passes(completion, rule, lambda twice: twice))
        if not passed:
            self._lost[write_id] = self._outlets[write_id]
        for one in passed:
            self._lost.pop(one.write_id, None)
            self._outlets.pop(one.write_id, None)
        return passed

    @property
    def in_flight(self) -> int:
        """Writes whose completion has not been given out, lost ones too."""
        return self._inner.in_flight + len(self._ended) + len(self._late) + len(self._lost)

    def close(self) -> None:
        """As the inner carrier."""
        self._inner.close()

    def _suffer(self, rule: Rule | None) -> None:
        if rule is not None:
            self._points.suffer(rule)

    def _call(self, method: str, call: Callable[[], Result], nothing: Result) -> Result:
        """The call's result; `nothing` where it is lost. Raises what the call raises."""
        rule = self._points.strikes(f"{self._family}.{method}", "before")
        try:
            self._suffer(rule)
            if rule is not None and rule.act is Act.DROP:
                return nothing
            result = call()
            if rule is not None and rule.act is Act.REPEAT:
                self._again(call)
            after = self._points.strikes(f"{self._family}.{method}", "after")
            self._suffer(after)
        except Broken as error:
            raise TransportFailed(str(error)) from error
        return nothing if after is not None and after.act is Act.DROP else result

    def _again(self, call: Callable[[], object]) -> None:
        try:
            call()
        except KvpushError:
            return  # the transport refuses what is done already, which is one right answer

    def _quietly(self, method: str, call: Callable[[], None]) -> None:
        """A call that must not raise: where it fails it was not made."""
        try:
            self._call(method, call, None)
        except TransportFailed:
            return


class FaultyTransport(FaultyCarrier):
    """The same for a transport, whose ways are points too."""

    def __init__(self, inner: Transport, points: Points, family: str) -> None:
        super().__init__(inner, points, family)
        self._ways = inner

    @property
    def bell(self) -> int | None:
        """The inner transport's."""
        return self._ways.bell

    def handles(self) -> Handles:
        """The inner transport's."""
        return self._ways.handles()

    def open_inlet(self, inlet_id: int, agent: str, pools: Sequence[Region]) -> bytes:
        """As the inner transport; metadata that is lost is empty."""
        return self._call("open_inlet", lambda: self._ways.open_inlet(inlet_id, agent, pools), b"")

    def close_inlet(self, inlet_id: int) -> None:
        """As the inner transport, and always done: nobody keeps a contract whose fence does not fence."""
        self._quietly("close_inlet", lambda: self._ways.close_inlet(inlet_id))
        self._ways.close_inlet(inlet_id)

    def open_outlet(self, outlet_id: int, agent: str, metadata: bytes, pools: Sequence[Region]) -> None:
        """As the inner transport."""
        self._call("open_outlet", lambda: self._ways.open_outlet(outlet_id, agent, metadata, pools), None)

    def close_outlet(self, outlet_id: int) -> None:
        """As the inner transport."""
        self._quietly("close_outlet", lambda: self._ways.close_outlet(outlet_id))

    def cut_outlet(self, outlet_id: int) -> None:
        """As the inner transport; what was lost on that way ends too."""
        self._quietly("cut_outlet", lambda: self._cut(outlet_id))

    def _cut(self, outlet_id: int) -> None:
        self._ways.cut_outlet(outlet_id)
        fault = Fault(Reason.TRANSPORT_FAILED, f"a fault of a test: a write to outlet {outlet_id} was lost")
        for write_id in [write for write, outlet in self._lost.items() if outlet == outlet_id]:
            del self._lost[write_id]
            self._ended.append(Completion(write_id, fault))

    def progress(self) -> None:
        """As the inner transport."""
        self._quietly("progress", self._ways.progress)
