# SPDX-License-Identifier: Apache-2.0
"""What may happen to a transfer, when, and to whom: a pure list, the same for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Phase(Enum):
    """Where a transfer is held while something happens to it."""

    UNRESERVED = "before reserve"
    ANNOUNCED = "announced"
    QUEUED = "matched"
    BETWEEN = "between chunks"
    POSTING = "posting"
    SEALED = "sealed"
    LANDED = "landed, not seen"

    @property
    def moved(self) -> bool:
        """Some of its bytes have landed, and some have not. What is sealed may be one write."""
        return self in (Phase.BETWEEN, Phase.POSTING)

    @property
    def writing(self) -> bool:
        """A write is in flight."""
        return self in (Phase.POSTING, Phase.SEALED)

    @property
    def matched(self) -> bool:
        """Both sides know of each other, and neither has ended."""
        return self.moved or self in (Phase.QUEUED, Phase.SEALED)


class Whom(Enum):
    """Who is hit."""

    P_ENGINE = "P engine"
    D_ENGINE = "D engine"
    P_DAEMON = "P daemon"
    D_DAEMON = "D daemon"
    P_MOVER = "P mover"
    D_MOVER = "D mover"
    ROUTER = "router"
    FIRST_RANK = "P's first rank"
    LAST_RANK = "P's last rank"

    @property
    def at_p(self) -> bool:
        """On P's node."""
        return self in (Whom.P_ENGINE, Whom.P_DAEMON, Whom.P_MOVER, Whom.FIRST_RANK, Whom.LAST_RANK)

    @property
    def daemon(self) -> bool:
        """It is one."""
        return self in (Whom.P_DAEMON, Whom.D_DAEMON)

    @property
    def node(self) -> str:
        """The name of that node, or of D's."""
        return "p" if self.at_p else "d"


MOVERS = (Whom.P_MOVER, Whom.D_MOVER)
NODES_HIT = (Whom.P_ENGINE, Whom.D_ENGINE, Whom.P_DAEMON, Whom.D_DAEMON, Whom.P_MOVER, Whom.D_MOVER)


class Blow(Enum):
    """How a process is hit."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"


class Cast(Enum):
    """Who plays: P and D asked directly, through a router, or a P of two ranks."""

    PAIR = "pair"
    ROUTER = "router"
    RANKS = "ranks"


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal. A stopped process goes on after `seconds`."""

    whom: Whom
    blow: Blow
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:g} s" if self.blow is Blow.STOP else ""
        return f"{self.blow.value} to {self.whom.value}{lasting}"


@dataclass(frozen=True, slots=True)
class Cut:
    """The cable between the two nodes is pulled for `seconds`."""

    seconds: float

    def __str__(self) -> str:
        return f"link down for {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Point:
    """A fault point of a process of P's side or D's (`node`), as `testing.faults` has them."""

    point: str
    when: str
    act: str
    process: str
    node: str
    nth: int = 1
    times: int = 1
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:g} s" if self.act in ("delay", "hang") else ""
        return f"{self.act} {self.when} {self.point} of {self.node}'s {self.process}{lasting}"


Fault = Strike | Cut | Point


@dataclass(frozen=True, slots=True)
class Scenario:
    """One transfer, held in a phase, and what happens to it there.

    `gap` seconds lie between two faults. With `beside`, a third node's transfers are watched meanwhile.
    """

    number: int
    cast: Cast
    phase: Phase
    faults: tuple[Fault, ...]
    gap: float = 0.0
    length: int = 1500
    d_first: bool = False
    beside: bool = False

    @property
    def name(self) -> str:
        """For people, and for a report."""
        what = " and ".join(str(fault) for fault in self.faults)
        return f"#{self.number} {self.cast.value}, {self.phase.value}: {what}"

    @property
    def strikes(self) -> list[Strike]:
        """Its signals."""
        return [fault for fault in self.faults if isinstance(fault, Strike)]

    @property
    def timed(self) -> bool:
        """Whether it shows how soon something is said or made good. Two faults may hide each other, a third
        node that is watched takes the time, and idle ranks of vLLM's spin until others hardly get to run."""
        return len(self.faults) == 1 and not self.beside and self.cast is not Cast.RANKS

    @property
    def silence(self) -> float:
        """Seconds for which whoever waits for an engine may have to, as that stands still; 0 where none does
        for so long that it is given up."""
        engines = (Whom.P_ENGINE, Whom.D_ENGINE)
        stops = [s.seconds for s in self.strikes if s.whom in engines and s.blow is Blow.STOP]
        return GIVEN_UP if any(seconds > GIVEN_UP for seconds in stops) else 0.0

    def deafness(self, node: str) -> float:
        """Seconds for which whoever waits for an engine of a node may have to, as the daemon beside it stands
        still; 0 where it does not for so long that the engine gives it up."""
        # An engine hears nothing of its daemon while there is nothing to hear: only pings without an answer
        # (client/kvpush_client/link.py) show that it stands still, and it is the daemon that keeps leases.
        stops = [s.seconds for s in self.strikes if s.whom.daemon and s.whom.node == node]
        return UNANSWERED if any(seconds > UNANSWERED for seconds in stops) else 0.0

    @property
    def lasting(self) -> bool:
        """Somebody stands still for so long that those on the same node give it up."""
        return bool(self.silence or self.deafness("p") or self.deafness("d"))

    def hits(self, whom: Whom, *blows: Blow) -> bool:
        """Whether somebody is hit, in one of these ways if any are named."""
        return any(strike.whom is whom and (not blows or strike.blow in blows) for strike in self.strikes)

    def ends(self, whom: Whom) -> bool:
        """Whether somebody is dead afterwards, so that it has to be started again."""
        return self.hits(whom, Blow.KILL, Blow.TERM)


SHORT, LONG = 0.5, 4.0
"""Seconds of a stop or a cut that nobody need notice, and of one that is longer than every silence."""
GIVEN_UP, LONGEST = 10.0, 16.0
"""Seconds after which an engine that stands still counts as dead, and of a stop that is longer."""
UNANSWERED, LONGER = 10.0, 12.0
"""Seconds after which its engines have given up a daemon that stands still, and of a stop that is longer."""


def catalogue(points: Iterable[tuple[Phase, Point]] = ()) -> list[Scenario]:
    """Everything with one fault, numbered from 0, at these fault points too."""
    found: list[tuple[Cast, Phase, Fault]] = []
    for phase, whom, blow in itertools.product(Phase, NODES_HIT, Blow):
        if phase is Phase.LANDED and whom is Whom.D_ENGINE and blow is Blow.STOP:
            continue  # that is how the phase is held
        engine = whom in (Whom.P_ENGINE, Whom.D_ENGINE)
        found.append((Cast.PAIR, phase, Strike(whom, blow, 2.0 if engine else SHORT)))
        if blow is Blow.STOP and not engine:
            found.append((Cast.PAIR, phase, Strike(whom, blow, LONG)))
    for whom in (Whom.P_ENGINE, Whom.D_ENGINE):
        for phase in (Phase.QUEUED, Phase.BETWEEN, Phase.POSTING):
            found.append((Cast.PAIR, phase, Strike(whom, Blow.STOP, LONGEST)))
    for whom in (Whom.P_DAEMON, Whom.D_DAEMON):
        for phase in (Phase.QUEUED, Phase.BETWEEN, Phase.POSTING):
            found.append((Cast.PAIR, phase, Strike(whom, Blow.STOP, LONGER)))
    for phase, seconds in itertools.product(Phase, (SHORT, LONG)):
        found.append((Cast.PAIR, phase, Cut(seconds)))
    for phase, blow in itertools.product(Phase, Blow):
        found.append((Cast.ROUTER, phase, Strike(Whom.ROUTER, blow, 1.0)))
    for phase, blow in itertools.product(Phase, Blow):
        found.append((Cast.RANKS, phase, Strike(Whom.LAST_RANK, blow, 2.0)))
    for phase, blow in itertools.product((Phase.ANNOUNCED, Phase.BETWEEN), (Blow.KILL, Blow.STOP)):
        found.append((Cast.RANKS, phase, Strike(Whom.FIRST_RANK, blow, 2.0)))
    for phase in (Phase.BETWEEN, Phase.POSTING):
        found.append((Cast.RANKS, phase, Strike(Whom.P_DAEMON, Blow.KILL)))
        found.append((Cast.RANKS, phase, Strike(Whom.P_MOVER, Blow.KILL)))
    found += [(Cast.PAIR, phase, point) for phase, point in points]
    return [Scenario(number, cast, phase, (fault,)) for number, (cast, phase, fault) in enumerate(found)]


def watched(number: int) -> Iterator[Scenario]:
    """What must not slow a third node's transfers down, numbered from `number` on."""
    faults: list[Fault] = [
        Strike(whom, blow, LONG) for whom in (Whom.D_DAEMON, Whom.D_MOVER) for blow in Blow
    ]
    for whom in (Whom.P_ENGINE, Whom.D_ENGINE):
        faults += [Strike(whom, Blow.KILL), Strike(whom, Blow.STOP, 2.0)]
    for fault in [*faults, Cut(LONG)]:
        yield Scenario(number, Cast.PAIR, Phase.SEALED, (fault,), beside=True)
        number += 1


def draw(count: int, seed: int, points: Sequence[tuple[Phase, Point]] = ()) -> list[Scenario]:
    """`count` scenarios: first one of each kind, then all others in turn, then pairs of faults.

    The same for the same arguments. They come in the order of their casts.
    """
    chance = random.Random(seed)
    single = catalogue(points)
    beside = list(watched(len(single)))
    chance.shuffle(single)
    # A kind is what is hit and how. One of each comes before a second of any, so that few cover much.
    rounds: dict[str, list[Scenario]] = {}
    for scenario in single:
        rounds.setdefault(_kind(scenario), []).append(scenario)
    ordered = [one for turn in itertools.zip_longest(*rounds.values()) for one in turn if one is not None]
    paired = list(_pairs(chance, ordered, max(count // 5, count - len(ordered) - len(beside)), len(single)))
    share = count - len(paired)
    seen = beside[: max(1, share // 20)] if share < len(ordered) + len(beside) else beside
    chosen = [*ordered[: share - len(seen)], *seen, *paired]
    varied = [replace(one, length=_length(chance, one), d_first=chance.random() < 0.5) for one in chosen]
    numbered = [replace(one, number=number) for number, one in enumerate(varied[:count])]
    chance.shuffle(numbered)
    return sorted(numbered, key=lambda one: list(Cast).index(one.cast))


def _length(chance: random.Random, scenario: Scenario) -> int:
    # Two ranks on two cores compute slowly, and a living sender that is slow is waited for.
    return chance.randrange(500, 700) if scenario.cast is Cast.RANKS else chance.randrange(1200, 1900)


def _kind(scenario: Scenario) -> str:
    fault = scenario.faults[0]
    return fault.act if isinstance(fault, Point) else f"{scenario.cast.value} {fault}"


def _pairs(chance: random.Random, single: Sequence[Scenario], count: int, number: int) -> Iterator[Scenario]:
    """Two faults that do not hit the same process, in a phase of the first."""
    of_pair = [one for one in single if one.cast is Cast.PAIR and not one.lasting]
    while count > 0:
        first, second = chance.sample(of_pair, 2)
        if _target(first.faults[0]) == _target(second.faults[0]):
            continue
        if first.phase is Phase.LANDED and second.hits(Whom.D_ENGINE, Blow.STOP):
            continue
        if isinstance(first.faults[0], Point) or isinstance(second.faults[0], Point):
            continue
        yield replace(
            first,
            number=number,
            faults=(*first.faults, *second.faults),
            gap=chance.choice((0.0, 0.05, 0.3, 1.0)),
        )
        count -= 1
        number += 1


def _target(fault: Fault) -> str:
    match fault:
        case Strike(whom=whom):
            # A mover dies with its daemon.
            return {"P mover": "P daemon", "D mover": "D daemon"}.get(whom.value, whom.value)
        case Cut():
            return "link"
        case Point(node=node, process=process):
            return f"{node} {process}"
