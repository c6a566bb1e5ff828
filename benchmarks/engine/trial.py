# SPDX-License-Identifier: Apache-2.0
"""One contender's turn: requests through a pair, what each took, and what the processes spent."""

from __future__ import annotations

import random
import statistics
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cpu import cpu_seconds
from benchmarks.engine import probes
from benchmarks.engine.contenders import Contender
from benchmarks.engine.pair import ANSWER_S, Pair
from benchmarks.report.statistics import percentile
from testing.clockwork.chain import FIRST_ORDINARY_TOKEN, reference
from testing.clockwork.engine import Output

VOCAB = 2048


class WrongTokens(RuntimeError):
    """A contender's output is not the reference: no number of this run counts."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a trial: `at` seconds after its begin. `kind` is for the report.

    `moved`: how many prompt tokens must have come from P, at the least.
    """

    prompt: Sequence[int]
    max_tokens: int
    at: float = 0.0
    kind: str = "request"
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request took, in seconds, from its dispatch on.

    tail       last byte final at P -> first token out of D
    handover   the part of it until D's first forward begins; the rest is that step
    """

    kind: str
    ttft: float
    tpot: float | None
    total: float
    tail: float
    handover: float

    def values(self) -> dict[str, float]:
        """For a row."""
        found = {"ttft_s": self.ttft, "total_s": self.total, "tail_s": self.tail, "handover_s": self.handover}
        return found if self.tpot is None else found | {"tpot_s": self.tpot}


@dataclass(frozen=True, slots=True)
class Trial:
    """All samples of a turn, in the order of its requests, and CPU seconds of engines and of daemons."""

    samples: Sequence[Sample]
    seconds: float
    engine_cpu: float
    node_cpu: float
    extra: Mapping[str, float] = field(default_factory=dict)
    """What a scenario measures besides."""

    def of(self, kind: str) -> list[Sample]:
        """The samples of one kind."""
        return [sample for sample in self.samples if sample.kind == kind]

    def values(self) -> dict[str, float]:
        """The turn as one row: medians over its requests, CPU per request."""
        ttfts = [s.ttft for s in self.samples]
        found = {
            "ttft_s": statistics.median(ttfts),
            "tail_s": statistics.median([s.tail for s in self.samples]),
            "handover_s": statistics.median([s.handover for s in self.samples]),
            "engine_cpu_s": self.engine_cpu / len(self.samples),
            "node_cpu_s": self.node_cpu / len(self.samples),
        }
        tpots = [s.tpot for s in self.samples if s.tpot is not None]
        if tpots:
            found["tpot_s"] = statistics.median(tpots)
        if len(ttfts) > 1:
            found["ttft_p95_s"] = percentile(ttfts, 95)
            found["ttft_p99_s"] = percentile(ttfts, 99)
            found["requests_per_s"] = len(ttfts) / self.seconds
        return found | dict(self.extra)


def prompt(count: int, *seed: object) -> list[int]:
    """Random tokens, the same for the same seed."""
    source = random.Random(repr((count, *seed)))
    return [source.randrange(FIRST_ORDINARY_TOKEN, VOCAB) for _ in range(count)]


def play(pair: Pair, contender: Contender, asks: Sequence[Ask]) -> Trial:
    """Runs the requests, each at its time. The pair is awake.

    Raises WrongTokens, and RuntimeError if KV that should have moved was computed on D instead.
    """
    pair.p.inspect(f"{probes.__name__}:forwards")
    pair.d.inspect(f"{probes.__name__}:forwards")
    ids = [str(uuid.uuid4()) for _ in asks]
    found: dict[int, tuple[float, Output, Output]] = {}
    errors: list[BaseException] = []
    node_pids = pair.node_pids
    before = cpu_seconds(pair.engine_pids), cpu_seconds(node_pids)
    begun = time.monotonic()

    def run(number: int) -> None:
        try:
            dispatched = time.monotonic()
            p, d = pair.begin(contender, asks[number].prompt, asks[number].max_tokens, ids[number])
            found[number] = dispatched, p.result(ANSWER_S), d.result(ANSWER_S)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    threads = []
    for number in sorted(range(len(asks)), key=lambda number: asks[number].at):
        delay = begun + asks[number].at - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    seconds = max(d.t_last for _, _, d in found.values()) - begun
    try:
        after = cpu_seconds(pair.engine_pids), cpu_seconds(node_pids)
    except RuntimeError as error:
        raise RuntimeError(f"{contender.name}: {error} during its turn; {pair.log_tail()}") from error
    at_p = pair.p.inspect(f"{probes.__name__}:forwards")
    at_d = at_p if pair.d is pair.p else pair.d.inspect(f"{probes.__name__}:forwards")
    samples = []
    for number, ask in enumerate(asks):
        dispatched, p_out, d_out = found[number]
        _check(contender, pair, ask, p_out, d_out)
        samples.append(_sample(ask, dispatched, d_out, at_p[ids[number]][1], at_d[ids[number]][0]))
    return Trial(samples, seconds, after[0] - before[0], after[1] - before[1])


def _sample(ask: Ask, dispatched: float, out: Output, final: float, first_forward: float) -> Sample:
    assert out.t_first is not None
    return Sample(
        kind=ask.kind,
        ttft=out.t_first - dispatched,
        tpot=None if ask.max_tokens < 2 else (out.t_last - out.t_first) / (ask.max_tokens - 1),
        total=out.t_last - dispatched,
        tail=out.t_first - final,
        handover=first_forward - final,
    )


def _check(contender: Contender, pair: Pair, ask: Ask, p: Output, d: Output) -> None:
    expected = reference(ask.prompt, ask.max_tokens, VOCAB)
    if d.token_ids != expected:
        raise WrongTokens(
            f"{contender.name}: D gave {d.token_ids[:4]}..., the reference is {expected[:4]}...; "
            f"{pair.log_tail()}"
        )
    if p is not d and p.token_ids != expected[:1]:
        raise WrongTokens(f"{contender.name}: P gave {p.token_ids}, the reference is {expected[:1]}")
    if p is not d and (d.external_cached_tokens or 0) < ask.moved:
        raise RuntimeError(
            f"{contender.name}: D got {d.external_cached_tokens} of {ask.moved} tokens from P and computed "
            f"the rest; {pair.log_tail()}"
        )
