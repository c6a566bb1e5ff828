# SPDX-License-Identifier: Apache-2.0
"""Runs tests in a tree and says how each ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum

from testing.guards.guard import Guard
from testing.guards.tree import Tree

SECONDS = 900
"""How long one run of pytest may take."""
BROKEN = (
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "UnboundLocalError",
)
"""What code that was cut badly raises, whatever was asked of it: it proves nothing."""
CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""How a test process ends that touched memory which is not there (any more)."""


class Outcome(Enum):
    """How a test ended; of its cases the worst that says something counts."""

    PASSED = "passed"
    FAILED = "failed"
    BROKEN = "broken"
    SKIPPED = "skipped"


def run(tree: Tree, tests: Sequence[str]) -> dict[str, Outcome]:
    """Runs the tests, and all cases of each."""
    report = tree.root / "guards.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "--hypothesis-profile=guards"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree.root,
        env=tree.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, Outcome.BROKEN)
    finally:
        # Whatever the tests left behind, also where they were interrupted.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode in CRASHES:
        # As good as a failure; but it took the report with it, and with that which test it was.
        return {test: run(tree, [test])[test] for test in tests} if tests[1:] else {tests[0]: Outcome.FAILED}
    if not report.exists():
        return dict.fromkeys(tests, Outcome.BROKEN)
    cases: defaultdict[str, set[Outcome]] = defaultdict(set)
    for case in ET.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        cases[f"{case.get('classname', '')}.{name}"].add(_outcome(case))
    return {test: _worst(cases[_dotted(test)]) for test in tests}


def caught(tree: Tree, guard: Guard) -> dict[str, Outcome]:
    """How the guard's tests end without it. It is caught where all of them fail."""
    with tree.without(guard):
        return run(tree, guard.tests)


def _dotted(test: str) -> str:
    """As pytest's report names it."""
    file, _, rest = test.partition("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *rest.split("::")])


def _outcome(case: ET.Element) -> Outcome:
    failure = case.find("failure")
    if failure is not None:
        kind = failure.get("message", "").partition(":")[0].rpartition(".")[2]
        return Outcome.BROKEN if kind in BROKEN else Outcome.FAILED
    if case.find("error") is not None:
        return Outcome.BROKEN
    return Outcome.SKIPPED if case.find("skipped") is not None else Outcome.PASSED


def _worst(outcomes: set[Outcome]) -> Outcome:
    for outcome in (Outcome.FAILED, Outcome.BROKEN, Outcome.SKIPPED, Outcome.PASSED):
        if outcome in outcomes:
            return outcome
    return Outcome.BROKEN  # its file could not be read
