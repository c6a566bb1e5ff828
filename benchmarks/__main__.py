# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark and writes its report.

    python -m benchmarks                        all parts, eight rounds
    python -m benchmarks --quick                the short run
    python -m benchmarks --part engine --scenario a1 --scenario g --rounds 4

The exit status is 0 if every part gave numbers, whether or not they reach their goals.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import datetime
from pathlib import Path

from benchmarks.control.part import ControlPart
from benchmarks.engine.part import EnginePart
from benchmarks.report import machine, tables
from benchmarks.report.record import Record
from benchmarks.report.values import Job, Part
from benchmarks.wire.part import WirePart

FULL_ROUNDS = 8
QUICK_ROUNDS = 3


def parts() -> list[Part]:
    """All parts, in the order in which they run."""
    return [WirePart(), ControlPart(), EnginePart()]


def main() -> int:
    """Command line."""
    known = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller cases")
    parser.add_argument("--rounds", type=int, help=f"default {FULL_ROUNDS}, {QUICK_ROUNDS} if quick")
    parser.add_argument("--part", action="append", choices=sorted(known), help="only this; may be repeated")
    parser.add_argument("--scenario", action="append", default=[], help="only this; may be repeated")
    parser.add_argument("--results", type=Path, default=machine.ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else FULL_ROUNDS)
    folder = arguments.results / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    record = Record(folder, machine.describe(), rounds, arguments.quick)
    begun = time.monotonic()
    # So that everything that was started ends, and namespaces go away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    for name in arguments.part or known:
        # Not in the results' folder: paths of unix sockets must be short.
        scratch = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
        job = Job(rounds, arguments.quick, frozenset(arguments.scenario), scratch, say)
        try:
            outcome = known[name].run(job)
        except Exception as error:  # noqa: BLE001 - the other parts still have something to say
            traceback.print_exc()
            record.failed(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            say(f"logs of the failed part are in {scratch}")
        else:
            record.add(name, outcome)
            if not outcome.failures:
                shutil.rmtree(scratch)
            for table in outcome.tables:
                print(tables.plain(table))
    print(tables.plain(tables.of_goals(record.goals)))
    print(f"{record.link()}/report.md")
    return 0 if record.complete else 1


if __name__ == "__main__":
    sys.exit(main())
