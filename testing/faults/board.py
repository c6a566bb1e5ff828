# SPDX-License-Identifier: Apache-2.0
"""The folder in which a test says what goes wrong, and reads what did."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testing.faults import catalog
from testing.faults.rules import Firing, Rule

VARIABLE = "KVPUSH_FAULTS"
"""Names the board's folder to a process of a test build."""
NODE = "KVPUSH_FAULTS_NODE"
"""Names its node, as rules and firings do."""

RULES = "rules.json"
FIRED = "fired.jsonl"
CLAIMS = "claims"


class Board:
    """A test's side. Rules hold from `set` to the next `set` or `clear`, in all processes that look here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / CLAIMS).mkdir(parents=True, exist_ok=True)
        self._rules: tuple[Rule, ...] = ()
        if not (folder / RULES).exists():
            self.clear()

    def environment(self, node: str) -> dict[str, str]:
        """What a process of a test build on this node needs to be given."""
        return {VARIABLE: str(self.folder), NODE: node}

    def set(self, rules: Sequence[Rule | Mapping[str, Any]]) -> None:
        """Puts these rules in the place of all others. Raises ValueError where one can happen nowhere."""
        taken = tuple(rule if isinstance(rule, Rule) else Rule.of(rule) for rule in rules)
        for rule in taken:
            catalog.check(rule)
        self._rules = taken
        written = self.folder / f"{RULES}.{os.getpid()}"
        written.write_text(json.dumps([rule.to_json() for rule in taken]))
        written.replace(self.folder / RULES)

    def clear(self) -> None:
        """Nothing goes wrong any more, and what hangs goes on."""
        self.set(())

    @property
    def record(self) -> list[Firing]:
        """All that has gone wrong here, in order."""
        path = self.folder / FIRED
        lines = path.read_text().splitlines() if path.exists() else []
        return [Firing.of(json.loads(line)) for line in lines]

    @property
    def firings(self) -> list[Firing]:
        """What the rules that hold have done."""
        held = {rule.id for rule in self._rules}
        return [firing for firing in self.record if firing.rule in held]

    async def fired(self, n: int = 1, deadline: float = 30.0) -> list[Firing]:
        """Returns once the rules that hold have struck `n` times. Raises AssertionError if they don't."""
        end = time.monotonic() + deadline
        while len(firings := self.firings) < n:
            if time.monotonic() > end:
                raise AssertionError(f"{len(firings)} of {n} faults within {deadline:g} s: {firings}")
            await asyncio.sleep(0.01)
        return firings
