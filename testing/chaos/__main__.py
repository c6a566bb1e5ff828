# SPDX-License-Identifier: Apache-2.0
"""`make chaos`: plays seeded scenarios and judges them.

    python -m testing.chaos --scenarios 40 --seed 7

Progress goes to stderr, the summary, one line of JSON, to stdout. Exit status: 0 all as promised, 1 not, 2 it
could not be played. `--only N` plays one scenario of that list again. The report lies in chaos-results/.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

from testing.chaos.account import Account
from testing.chaos.actor import Actor
from testing.chaos.scenario import Scenario, draw
from testing.chaos.stage import LEASE, Stage

RESULTS = Path("chaos-results")
SCENARIOS = 320


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def run(scenarios: list[Scenario], seed: int, results: Path) -> Account:
    """Plays all of them, and writes the report."""
    account = Account(seed, LEASE)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        stage = Stage(Path(folder))
        try:
            with stage:
                actor = Actor(stage)
                for scenario in scenarios:
                    played = actor.play(scenario)
                    account.played.append(played)
                    wrong = played.judge(LEASE)
                    told = "; ".join(wrong) if wrong else "ok"
                    say(f"[{time.monotonic() - began:6.1f} s] {played.took:5.1f} s {scenario.name}: {told}")
                    account.wrong_bytes = actor.books.wrong_bytes
                    account.transfers, account.bytes = actor.books.moved
                    write(account, results)
        finally:
            keep_logs(Path(folder), results / "logs")
    return account


def write(account: Account, results: Path) -> None:
    """The report, for people and for programs."""
    results.mkdir(parents=True, exist_ok=True)
    (results / "chaos-report.md").write_text(account.markdown())
    (results / "chaos-report.json").write_text(json.dumps(account.record(), indent=1))


def keep_logs(folder: Path, kept: Path) -> None:
    """Copies the logs of all processes to where the report is."""
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("*.log"):
        old.unlink()
    for log in [*folder.glob("*.log"), *folder.glob("engines/*.log")]:
        (kept / log.name).write_bytes(log.read_bytes())


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m testing.chaos", description="Seeded chaos.")
    parser.add_argument("--scenarios", type=int, default=SCENARIOS)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--only", type=int, action="append", help="number of a scenario in that list")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root: it makes network namespaces")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    scenarios = draw(options.scenarios, seed)
    if options.only:
        scenarios = [one for one in scenarios if one.number in options.only]
    say(f"{len(scenarios)} scenarios; SCENARIOS={options.scenarios} SEED={seed} plays them again")
    account = run(scenarios, seed, options.results)
    print(json.dumps(account.last_line()))
    return 0 if account.well else 1


if __name__ == "__main__":
    sys.exit(main())
