# SPDX-License-Identifier: Apache-2.0
"""The way to one receiving agent: the writes that are to go there, some parts of them at a time."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from kvpush_client.events import Fault, Reason
from kvpushd.core.runs import Runs
from kvpushd.errors import BadMemory, Invalid, TransportFailed
from kvpushd.memory.host import bytes_at
from kvpushd.mover.transport import notices
from kvpushd.mover.transport.agents import Agents, name_of, register
from kvpushd.mover.transport.base import Completion, Region, Write
from kvpushd.mover.transport.inspection import Inspections
from kvpushd.mover.transport.notices import Added, Hello, Notice, Unpacked, Welcome
from kvpushd.mover.transport.parcel import SLOT_BYTES, SLOTS, worth_packing
from kvpushd.mover.transport.parts import PART_RUNS, parts_of
from kvpushd.mover.transport.staging import Staging
from kvpushd.mover.transport.transfer import Transfer, rows

STREAK_SECONDS = 0.25
"""How long an outlet goes on without a pause, in which all that is under way has ended.

NIXL's progress goes on as long as there is more to take in. Where a receiver is slower than its sender, it
does not come back while bytes come: two senders kept a mover from its commands, beats and fences for seconds.
In a pause there is nothing to take in, and a link of 176 MB/s is idle for 1 to 2 ms. The limit of runs is for
those of a few KiB, which keep a receiver busy for much longer than their sender."""

HELLO_SECONDS = 0.5
"""After which a hello is said again that was not answered, where there is something to answer."""
ASKED = 8
"""Parts under way that are asked in each round whether they are over, the oldest ones: they end in about the
order in which they began, and to ask costs 3 us. Of hundreds the others are asked in some rounds only."""
ALL_ROUNDS = 4
"""Of so many rounds, in one all are asked."""
HIGHEST = (1 << 63) - 1
"""No address of a process is above this."""


class _Part(Protocol):
    """What is under way of a write at a time."""

    @property
    def runs(self) -> int:
        """How many NIXL carries for it."""
        ...

    def over(self) -> bool:
        """Whether all of it is in its pool. Raises NIXL's errors, TransportFailed."""
        ...

    def release(self) -> None:
        """Lets go of what NIXL holds for it."""
        ...


@dataclass(slots=True)
class _InFlight:
    """A posted write: what of it is to be begun, and how many parts are under way."""

    write: Write
    source: Region
    target: int
    plain: deque[Runs]
    parcels: deque[Runs]
    under_way: int = 0
    fault: Fault | None = None


class Outlet:
    """Carries writes by a sending agent of its own. They are begun in the order in which they were posted.

    Completions that are due are put into `ended`.
    """

    def __init__(self, agents: Agents, name: str) -> None:
        """Makes a sending agent of that name. Raises NIXL's errors."""
        self.agent = ""
        """The name of the receiving one."""
        self.closing = False
        self.ended: list[Completion] = []
        self._agents = agents
        self._errors = agents.errors
        self._sender = agents.make(name, self)
        self._targets: dict[bytes, int] = {}
        self._token = b""
        self._sources: dict[bytes, Any] = {}
        """What is registered with the sender."""
        self._writes: dict[int, _InFlight] = {}
        """In the order in which they were posted."""
        self._unbegun: dict[int, _InFlight] = {}
        """Those of which some is to be begun."""
        self._under_way: list[tuple[int, _Part]] = []
        self._runs = 0
        """Of all parts under way."""
        self._looks = 0
        self._busy_since = 0.0
        self._inspections = Inspections()
        self._staging: Staging | None = None
        self._greeted = 0.0
        """When hello was said last."""
        self._met = False
        """Whether the receiving agent has answered anything."""
        self._may_pack = False
        self._packs = False
        """Whether what is posted now goes as parcels."""

    def meet(self, agent: str, metadata: bytes, targets: dict[bytes, int]) -> None:
        """Names the receiving agent, and the addresses of the pools behind it.

        Raises Invalid where the metadata is of another agent, NIXL's errors where it is of none.
        """
        name = name_of(self._sender.add_remote_agent(metadata))
        if name != agent:
            raise Invalid(f"the metadata is of agent {name}, expected {agent}")
        self.agent, self._targets, self._token = name, targets, notices.token_of(metadata)

    def connect(self, packs: bool) -> None:
        """Begins to connect, before the first write would. Raises NIXL's errors.

        With `packs`, short runs are packed once the receiver has said that it takes parcels in.
        """
        self._sender.make_connection(self.agent)
        self._may_pack = packs

    def register(self, region: Region) -> None:
        """Makes a pool a possible source. Raises NIXL's errors."""
        self._sources[region.pool_id] = register(self._sender, region.address, region.nbytes)

    def deregister(self, pool_id: bytes) -> None:
        """Undoes it."""
        registered = self._sources.pop(pool_id, None)
        if registered is not None:
            self._sender.deregister_memory(registered)

    def close(self) -> list[int]:
        """Destroys the agent; returns the writes that have not ended. Nothing reads their sources now."""
        staging, self._staging = self._staging, None
        self._under_way.clear()
        self._sender = None
        if staging is not None:
            staging.close()
        return [*self._writes, *self._inspections.write_ids]

    @property
    def in_flight(self) -> int:
        """Writes and inspections that have not ended."""
        return len(self._writes) + len(self._inspections)

    @property
    def transfers(self) -> int:
        """Parts under way."""
        return len(self._under_way)

    @property
    def registrations(self) -> int:
        """Of pools. That of the slots for parcels lives as long as the outlet."""
        return len(self._sources)

    def progress(self) -> None:
        """Takes in what the agent is told by the receiving one."""
        for name, notice in self._agents.heard(self._sender):
            if name != self.agent:
                continue
            self._met = True
            if isinstance(notice, Unpacked) and self._staging is not None:
                self._staging.hear(notice)
            elif isinstance(notice, Added):
                self._inspections.hear(notice)
            elif isinstance(notice, Welcome) and self._staging is None and self._may_pack:
                self._is_welcome(notice)

    def _is_welcome(self, welcome: Welcome) -> None:
        if (welcome.slots, welcome.slot_bytes) != (SLOTS, SLOT_BYTES) or welcome.address > HIGHEST:
            return
        with contextlib.suppress(BadMemory, *self._errors):  # where memory is short, runs go as they are
            self._staging = Staging(self._sender, self.agent, welcome.address, self._errors, self._tell)
            self._packs = True

    def _greet(self) -> None:
        """Says how this agent is answered, where an answer is due: until one comes."""
        now = time.monotonic()
        due = self._staging is None if self._may_pack else not self._met
        if not due or (self._greeted and now - self._greeted < HELLO_SECONDS):
            return
        self._greeted = now
        with contextlib.suppress(*self._errors):  # what is wrong, the write will say
            self._tell(Hello(self._token, self._agents.connection_of(self._sender)))

    def post(self, write: Write, source: Region) -> None:
        """Begins the write, or lets it wait for those that were posted before it.

        Raises Invalid where its pool is not behind this outlet.
        """
        target = self._target_of(write)
        packs = self._packs and worth_packing(write.runs)
        plain, parcels = parts_of(write.runs, packs)
        flight = _InFlight(write, source, target, plain, parcels)
        self._writes[write.write_id] = self._unbegun[write.write_id] = flight
        if self._may_pack:
            self._greet()
        self._begin()

    def inspect(self, write: Write, source: Region) -> None:
        """Begins an inspection. Raises Invalid where its pool is not behind this outlet."""
        pool = self._target_of(write)
        self._greet()
        self._inspections.add(write.write_id, bytes_at(source.address, source.nbytes), pool, write.runs)

    def _target_of(self, write: Write) -> int:
        if write.target_pool not in self._targets:
            raise Invalid(f"pool {write.target_pool.hex()} is not behind outlet {write.outlet_id}")
        return self._targets[write.target_pool]

    def moved_on(self) -> bool:
        """Whether some of what is under way was found to be over; begins what comes next."""
        if self._inspections or (self._may_pack if self._staging is None else self._staging.is_waiting):
            # What comes while parts are asked after is taken from the socket by that, and rings no more.
            self.progress()
        self._look_on()
        self._looks += 1
        most = ASKED if self._looks % ALL_ROUNDS else len(self._under_way)
        going: list[tuple[int, _Part]] = []
        over: list[tuple[int, _Part]] = []
        for write_id, part in self._under_way:
            is_over = len(going) < most and self._is_over(self._writes[write_id], part)
            (over if is_over else going).append((write_id, part))
        self._under_way = going
        for write_id, part in over:
            self._runs -= part.runs
            self._writes[write_id].under_way -= 1
            part.release()
            self._settle(write_id)
        if over:
            self._begin()
        return bool(over)

    def _is_over(self, flight: _InFlight, part: _Part) -> bool:
        try:
            return part.over()
        except self._errors as error:
            self._fail(flight, error)
        except TransportFailed as error:
            self._fail(flight, error)
        return True

    def _look_on(self) -> None:
        """Goes on with the inspections."""
        if self._inspections:
            self._greet()
        try:
            ended = self._inspections.step(self._tell)
        except self._errors as error:
            ended = self._inspections.give_up(self._fault(error))
        if ended is not None:
            self.ended.append(ended)

    def _begin(self) -> None:
        """Begins as many parts of the writes as may be under way."""
        now = time.monotonic()
        for write_id, flight in list(self._unbegun.items()):
            while flight.plain or flight.parcels:
                if not self._under_way:
                    self._busy_since = now
                elif now - self._busy_since > STREAK_SECONDS:
                    return
                try:
                    part = self._next(flight)
                except self._errors as error:
                    self._fail(flight, error)
                    continue
                if part is None:
                    return
                self._under_way.append((write_id, part))
                self._runs += part.runs
                flight.under_way += 1
            del self._unbegun[write_id]
            self._settle(write_id)

    def _next(self, flight: _InFlight) -> _Part | None:
        """Begins another part of a write, if there is room for it. Raises NIXL's errors."""
        if flight.parcels and self._staging is not None and self._staging.has_room:
            source = bytes_at(flight.source.address, flight.source.nbytes)
            return self._staging.send(flight.target, source, flight.parcels.popleft())
        if not flight.plain:
            return None
        runs = flight.plain[0]
        if self._under_way and self._runs + len(runs.length) > PART_RUNS:
            return None
        flight.plain.popleft()
        near = rows(runs.source + flight.source.address, runs.length)
        far = rows(runs.target + flight.target, runs.length)
        return Transfer(self._sender, self.agent, near, far, self._errors)

    def _fail(self, flight: _InFlight, error: Exception) -> None:
        """A part of a write failed: what of it is not begun never is. It ends once nothing is under way.

        No slot is used again: a parcel that failed may still be on its way, and land on the next.
        """
        flight.plain.clear()
        flight.parcels.clear()
        self._packs = False
        for other in self._writes.values():
            for parcel in other.parcels:
                other.plain.extend(parts_of(parcel, packs=False)[0])
            other.parcels.clear()
        flight.fault = flight.fault or self._fault(error)

    def _fault(self, error: Exception) -> Fault:
        detail = f"the write to agent {self.agent} failed ({type(error).__name__}: {error})"
        return Fault(Reason.TRANSPORT_FAILED, detail)

    def _tell(self, notice: Notice) -> None:
        self._agents.tell(self._sender, self.agent, notice)

    def _settle(self, write_id: int) -> None:
        """Says that a write has ended, if it has."""
        flight = self._writes[write_id]
        if flight.plain or flight.parcels or flight.under_way:
            return
        del self._writes[write_id]
        self._unbegun.pop(write_id, None)
        self.ended.append(Completion(write_id, flight.fault))
