# SPDX-License-Identifier: Apache-2.0
"""`python -m testing.guards`: takes each guard out in turn and requires that the tests which cover it fail.

The tree is copied to a temporary folder; in the copy, whole, all covering tests must pass. Then, for each
guard, its text is replaced, its tests run, and the text put back. The last line is JSON. Exit status 1 if a
guard was missed, 2 if the tests do not pass in the whole tree.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testing.guards import trial
from testing.guards.guard import GROUPS, Guard, read
from testing.guards.tree import Tree
from testing.guards.trial import Outcome

JOBS = 2
ALONE = "vllm"
"""The group whose tests take the machine: one at a time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m testing.guards", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="guards to try; all if none is named")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only those of this group")
    parser.add_argument("--list", action="store_true", help="show the guards, and try none")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"copies to work in at once ({JOBS})")
    options = parser.parse_args(argv)
    table = read()
    unknown = set(options.names) - set(table)
    if unknown:
        parser.error(f"no guard is called {', '.join(sorted(unknown))}: --list shows them")
    chosen = [
        guard
        for guard in table.values()
        if guard.name in (options.names or (guard.name,)) and guard.group in (options.group or GROUPS)
    ]
    if options.list:
        for guard in chosen:
            print(f"{guard.group:<6} {guard.name:<58} {', '.join(guard.serves)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        return _try(chosen, Path(folder), options.jobs)


def _try(chosen: Sequence[Guard], folder: Path, jobs: int) -> int:
    missed: list[str] = []
    for group in GROUPS:
        mine = [guard for guard in chosen if guard.group == group]
        if not mine:
            continue
        trees = [Tree.copy(folder / f"{group}-{n}") for n in range(1 if group == ALONE else jobs)]
        wrong = _whole(trees[0], mine)
        if wrong:
            print(f"in the whole tree these tests do not pass: {', '.join(wrong)}", file=sys.stderr)
            return 2
        missed += _without(trees, mine)
    caught = len(chosen) - len(missed)
    print(json.dumps({"guards": len(chosen), "caught": caught, "missed": missed}))
    return 1 if missed else 0


def _whole(tree: Tree, guards: Sequence[Guard]) -> list[str]:
    """The covering tests that do not pass where nothing is missing: neither at once nor, where a busy machine
    was the reason, by themselves."""
    tests = sorted({test for guard in guards for test in guard.tests})
    failing = _failing(tree, tests)
    still = _failing(tree, sorted(failing)) if failing else {}
    return [f"{test} ({how.value})" for test, how in still.items()]


def _failing(tree: Tree, tests: Sequence[str]) -> dict[str, Outcome]:
    return {test: how for test, how in trial.run(tree, tests).items() if how is not Outcome.PASSED}


def _without(trees: Sequence[Tree], guards: Sequence[Guard]) -> list[str]:
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(guard: Guard) -> tuple[Guard, dict[str, Outcome], float]:
        tree, since = free.get(), time.monotonic()
        try:
            return guard, trial.caught(tree, guard), time.monotonic() - since
        finally:
            free.put(tree)

    missed = []
    with ThreadPoolExecutor(len(trees)) as pool:
        for guard, outcomes, seconds in pool.map(one, guards):
            whole = all(outcome is Outcome.FAILED for outcome in outcomes.values())
            print(f"{'caught' if whole else 'MISSED'}  {seconds:5.1f} s  {guard.name}", flush=True)
            if not whole:
                missed.append(guard.name)
                for test, outcome in outcomes.items():
                    print(f"          {outcome.value:<7} {test}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
