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
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from testing.chaos.account import UNDISTURBED, Account, Played
from testing.chaos.actor import Actor
from testing.chaos.points import strikes
from testing.chaos.pulse import Pulse
from testing.chaos.scenario import Scenario, draw
from testing.chaos.stage import LEASE, SILENCE, Stage
from testing.clockwork.harness import Harness

RESULTS = Path("chaos-results")
LOGS = "logs"
SCENARIOS = 360
LOOKS = 3
IN_VAIN = 2
"""Times that a scenario is played again where the machine let nobody run."""


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def run(scenarios: list[Scenario], seed: int, results: Path, harness: Harness | None = None) -> Account:
    """Plays all of them, and writes the report. Engines are forked of `harness`, if there is one."""
    account = Account(seed, LEASE)
    began = time.monotonic()
    left = list(scenarios)
    while left:
        with tempfile.TemporaryDirectory(prefix="kvc") as folder:
            try:
                play(left, account, Stage(Path(folder), harness), began, results)
            finally:
                keep_logs(Path(folder), results / LOGS)
    return account


def play(left: list[Scenario], account: Account, stage: Stage, began: float, results: Path) -> None:
    """Plays what is left, from the front, on one stage, until that is spoiled."""
    transfers, moved, wrong_bytes = account.transfers, account.bytes, account.wrong_bytes
    with stage:
        actor = Actor(stage)
        while left and not actor.lost:
            scenario = left.pop(0)
            played = turn(actor, scenario)
            if played.undisturbed is not None and played.undisturbed < UNDISTURBED:
                look_again(actor, played)
            wrong = played.judge(LEASE)
            told = "; ".join(wrong) if wrong else "ok"
            if played.shows_nothing(LEASE, SILENCE) and account.plays_in_vain(scenario) < IN_VAIN:
                account.in_vain.append(played)
                left.insert(0, scenario)
                told = f"again, as the machine let nobody run for {played.starved:.1f} s: {told}"
            else:
                account.played.append(played)
            say(f"[{time.monotonic() - began:6.1f} s] {played.took:5.1f} s {scenario.name}: {told}")
            account.wrong_bytes = wrong_bytes + actor.books.wrong_bytes
            account.transfers = transfers + actor.books.moved[0]
            account.bytes = moved + actor.books.moved[1]
            write(account, results)


def turn(actor: Actor, scenario: Scenario) -> Played:
    """Plays one."""
    with Pulse() as pulse:
        played = actor.play(scenario)
    played.starved = pulse.starved
    return played


def look_again(actor: Actor, played: Played) -> None:
    """A rate over two seconds moves by a tenth by itself: where one is low, the median of three looks counts.
    Whatever else is wrong with the other two is held against this one."""
    looks = [played.undisturbed]
    while len(looks) < LOOKS and not actor.lost:
        other = turn(actor, played.scenario)
        looks.append(other.undisturbed)
        other.undisturbed = None
        played.repeats.append(other)
    found = [look for look in looks if look is not None]
    played.undisturbed = statistics.median(found)


def write(account: Account, results: Path) -> None:
    """The report, for people and for programs."""
    results.mkdir(parents=True, exist_ok=True)
    (results / "chaos-report.md").write_text(account.markdown())
    (results / "chaos-report.json").write_text(json.dumps(account.record(), indent=1))


def keep_logs(folder: Path, kept: Path) -> None:
    """Copies the logs of all processes to where the report is."""
    kept = kept / str(len(list(kept.glob("*"))))  # one folder for each stage
    kept.mkdir(parents=True)
    for log in [*folder.glob("*.log"), *folder.glob("engines/*.log")]:
        (kept / log.name).write_bytes(log.read_bytes())


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m testing.chaos", description="Seeded chaos.")
    parser.add_argument("--scenarios", type=int, default=SCENARIOS)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--only", type=int, action="append", help="number of a scenario in that list")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only each Nth, from the Kth on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all that was started is ended
    if os.geteuid() != 0:
        parser.error("needs root: it makes network namespaces")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    scenarios = draw(options.scenarios, seed, list(strikes()))
    part, parts = (int(number) for number in options.part.split("/"))
    scenarios = scenarios[part - 1 :: parts]
    if options.only:
        scenarios = [one for one in scenarios if one.number in options.only]
    shutil.rmtree(options.results / LOGS, ignore_errors=True)
    say(f"{len(scenarios)} scenarios; SCENARIOS={options.scenarios} SEED={seed} plays them again")
    account = run(scenarios, seed, options.results)
    print(json.dumps(account.last_line()))
    return 0 if account.well else 1


if __name__ == "__main__":
    sys.exit(main())
