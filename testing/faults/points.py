# SPDX-License-Identifier: Apache-2.0
"""A process's side of the board: what goes wrong here, now."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from testing.faults.board import CLAIMS, FIRED, NODE, RULES, VARIABLE
from testing.faults.catalog import Point
from testing.faults.rules import Act, Firing, Rule

LOOK = 0.01
"""Seconds between looks at whether a hang is over."""
EXIT_STATUS = 70

Passed = TypeVar("Passed")


class Broken(Exception):
    """What was to be carried, or called, fails here."""


class Points:
    """All points of one process. For any thread."""

    def __init__(self, folder: Path, process: str, node: str) -> None:
        self._folder = folder
        self._process = process
        self._node = node
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] = (0, 0)
        self._rules: tuple[Rule, ...] = ()
        self._seen: Counter[str] = Counter()
        self._spent: set[str] = set()

    @classmethod
    def of_environment(cls, process: str, environment: Mapping[str, str], node: str = "") -> Points:
        """Those of a process that was given Board.environment. Raises KeyError without."""
        return cls(Path(environment[VARIABLE]), process, node or environment.get(NODE, ""))

    def strikes(self, name: str, when: str) -> Rule | None:
        """The rule that strikes this time, which is then in the record; the first one that can."""
        with self._lock:
            self._look()
            point = Point(name, self._process)
            for rule in self._rules:
                if not rule.is_at(name, when) or not point.allows(when, rule.act) or rule.id in self._spent:
                    continue
                self._seen[rule.id] += 1
                if self._seen[rule.id] >= rule.nth and self._claim(rule):
                    self._write_down(name, rule)
                    return rule
        return None

    def holds(self, rule: Rule) -> bool:
        """Whether a rule has not been taken away."""
        with self._lock:
            self._look()
            return any(held.id == rule.id for held in self._rules)

    def suffer(self, rule: Rule, over: Callable[[], bool] = lambda: False) -> None:
        """Takes the time that a delay or a hang takes, on this thread; `over` ends it early.

        Raises Broken for a fail. Never returns from an exit.
        """
        end = time.monotonic() + rule.seconds
        while self._lasts(rule, end) and not over():
            time.sleep(min(LOOK, max(rule.seconds, 0.001)) if rule.act is Act.DELAY else LOOK)

    async def endure(self, rule: Rule) -> None:
        """The same, on an event loop, until it is cancelled."""
        end = time.monotonic() + rule.seconds
        while self._lasts(rule, end):  # noqa: ASYNC110, the board is a file
            await asyncio.sleep(LOOK)

    def _lasts(self, rule: Rule, end: float) -> bool:
        match rule.act:
            case Act.EXIT:
                os._exit(EXIT_STATUS)
            case Act.FAIL:
                raise Broken(f"a fault of a test: {rule.point} fails")
            case Act.DELAY:
                return time.monotonic() < end
            case Act.HANG:
                return self.holds(rule)
            case _:
                return False

    def _look(self) -> None:
        try:
            found = os.stat(self._folder / RULES)
        except FileNotFoundError:
            return
        # By inode too: a clock's tick may see two sets of rules.
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp != self._stamp:
            self._stamp = stamp
            rules = (Rule.of(fields) for fields in json.loads((self._folder / RULES).read_text()))
            self._rules = tuple(rule for rule in rules if rule.is_for(self._process, self._node))

    def _claim(self, rule: Rule) -> bool:
        """One of the rule's times, out of what all processes share."""
        if rule.times is None:
            return True
        for number in range(rule.times):
            try:
                claim = os.open(
                    self._folder / CLAIMS / f"{rule.id}.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY
                )
            except FileExistsError:
                continue
            os.close(claim)
            return True
        self._spent.add(rule.id)
        return False

    def _write_down(self, name: str, rule: Rule) -> None:
        here = (os.getpid(), self._process, self._node, time.time())
        firing = Firing(name, rule.when, rule.act, *here, rule.id)
        line = json.dumps(firing.to_json()) + "\n"
        record = os.open(self._folder / FIRED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(record, line.encode())
        finally:
            os.close(record)


class Lane(Generic[Passed]):
    """What passes one way: keeps what was held back to go behind its successor."""

    def __init__(self) -> None:
        self._held: list[Passed] = []

    def passes(self, what: Passed, rule: Rule | None, again: Callable[[Passed], Passed]) -> Iterator[Passed]:
        """What goes on in its place, once the rule has taken its time; `again` makes the copy of a repeat."""
        act = None if rule is None else rule.act
        if act is Act.REORDER:
            self._held.append(what)
            return
        held, self._held = self._held, []
        copies = [again(what)] if act is Act.REPEAT else []
        if act is not Act.DROP:
            yield what
        yield from copies
        yield from held
