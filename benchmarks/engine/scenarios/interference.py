# SPDX-License-Identifier: Apache-2.0
"""f: what transfers cost those who do not wait for them. D decodes four requests, and P computes prompts,
with their KV moving and without; as the floor, the same bytes go through a plain socket meanwhile."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.engine import probes
from benchmarks.engine.contenders import ESSENTIAL, KVPUSHD, PULL, Contender
from benchmarks.engine.pair import ANSWER_S, Pair
from benchmarks.engine.scenarios.base import HOST_S, P_CLOCK, PROMPT, Findings, calibrate
from benchmarks.engine.stage import Rounds, Stage
from benchmarks.engine.trial import VOCAB, Sample, WrongTokens, prompt
from benchmarks.report.statistics import Ratio
from benchmarks.report.values import Table, goal
from testing.clockwork.chain import reference
from testing.clockwork.clock import Clock
from testing.clockwork.engine import Output, Request

_STEP_S = 0.025
_DECODERS = 4
_LONGEST = 1200
_CHUNK = 512
_PROMPTS = 3
_QUIET, _SOCKET = ", no transfers", ", a socket instead"


@dataclass(frozen=True, slots=True)
class Felt:
    """TPOT of the running requests, the longest wait for a token, and P's throughput."""

    tpot: float
    stall: float
    tokens_per_s: float
    samples: Sequence[Sample] = ()

    def values(self) -> dict[str, float]:
        """As a row."""
        return {"tpot_s": self.tpot, "stall_s": self.stall, "p_tokens_per_s": self.tokens_per_s}


class Interference:
    """Plays f."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """As far as the job wants it."""
        if not stage.job.wants("f"):
            return
        calibrate(stage, findings, "f", 1.0)
        stage.configure(P_CLOCK, Clock(0.0, _STEP_S, HOST_S), _CHUNK)
        findings.facts.append(
            f"f: D decodes {_DECODERS} requests at {_STEP_S * 1e3:.0f} ms a step while P computes {_PROMPTS} "
            f"prompts of {PROMPT} tokens"
        )
        size = _PROMPTS * PROMPT * stage.bytes_per_token

        def turn(pair: Pair, contender: Contender, number: int) -> Felt:
            prompts = [prompt(PROMPT, "f", contender.name, number, i) for i in range(_PROMPTS)]
            decoders = _decode(pair, contender, number)
            carrier = threading.Thread(target=stage.carriers.socket_seconds, args=(size,))
            begun = time.monotonic()
            if contender.name.endswith(_SOCKET):
                carrier.start()
            quiet = contender.name.endswith((_QUIET, _SOCKET))
            _compute(pair, contender, prompts, moving=not quiet)
            ended = time.monotonic()
            times = [decoder.times_so_far for decoder in decoders]
            for decoder in decoders:
                pair.d.abort(decoder.request_id)
            if carrier.ident is not None:
                carrier.join()
            _check(decoders, number, contender)
            spans = pair.p.inspect(f"{probes.__name__}:forwards").values()
            busy = max(end for _, end in spans) - min(begin for begin, _ in spans)
            gaps = [
                later - earlier
                for of_one in times
                for earlier, later in itertools.pairwise(of_one)
                if begun <= earlier and later <= ended
            ]
            return Felt(statistics.fmean(gaps), max(gaps), _PROMPTS * PROMPT / busy)

        played = (KVPUSHD, PULL) if stage.job.quick else ESSENTIAL
        quiet = {c: replace(c, name=c.name + _QUIET) for c in played}
        floor = replace(KVPUSHD, name=KVPUSHD.name + _SOCKET)
        rounds = stage.rounds("f", [*played, *quiet.values(), floor], turn, told="tpot_s")
        stage_rows = _Compared(rounds, {c.name: quiet[c] for c in played} | {floor.name: quiet[KVPUSHD]})
        findings.rounds.append(rounds)
        least = stage_rows.ratio("tpot_s", floor).value
        most = stage_rows.ratio("p_tokens_per_s", floor).value
        tpot, throughput = stage_rows.ratio("tpot_s", KVPUSHD), stage_rows.ratio("p_tokens_per_s", KVPUSHD)
        findings.goals += [
            goal(6, "D's TPOT, with / without", "<=", max(1.03, least + 0.02), tpot, "f", KVPUSHD.name),
            goal(
                6, "P's tokens/s, with / without", ">=", min(0.98, most - 0.02), throughput, "f", KVPUSHD.name
            ),
        ]
        worst = max(played[1:], key=lambda c: stage_rows.ratio("tpot_s", c).value)
        lost = stage_rows.ratio("tpot_s", worst)
        findings.goals.append(
            goal(6, "a contender visibly loses: D's TPOT, with / without", ">=", 1.03, lost, "f", worst.name)
        )
        findings.tables.append(stage_rows.table([*played, floor]))


class _Compared:
    """Each contender against itself without transfers."""

    def __init__(self, rounds: Rounds, quiet: dict[str, Contender]) -> None:
        self._rounds = rounds
        self._quiet = quiet

    def ratio(self, measure: str, contender: Contender) -> Ratio:
        return self._rounds.ratio(measure, contender, self._quiet[contender.name])

    def table(self, contenders: Sequence[Contender]) -> Table:
        rows = []
        for contender in contenders:
            found = [self.ratio(m, contender) for m in ("tpot_s", "stall_s", "p_tokens_per_s")]
            rows.append([contender.name, *(f"{r.value:.3f} ({r.low:.3f} – {r.high:.3f})" for r in found)])
        header = ["contender", "D's TPOT", "D's longest wait", "P's tokens/s"]
        return Table("f: with transfers / without, 95 % interval", header, rows)


def _decode(pair: Pair, contender: Contender, number: int) -> list[Request]:
    """Requests that D runs by itself; all have their first token."""
    decoders = [pair.d.submit(_own(contender, number, i), _LONGEST) for i in range(_DECODERS)]
    for decoder in decoders:
        decoder.first_token(60)
    return decoders


def _own(contender: Contender, number: int, decoder: int) -> list[int]:
    return prompt(64, "f decoder", contender.name, number, decoder)


def _compute(pair: Pair, contender: Contender, prompts: Sequence[Sequence[int]], *, moving: bool) -> None:
    """P computes all prompts, and D gets their KV; returns when all have ended."""
    pair.p.inspect(f"{probes.__name__}:forwards")
    if not moving:
        legs = [pair.p.submit(tokens, 1) for tokens in prompts]
        for leg in legs:
            leg.result(ANSWER_S)
        return
    ends: list[Output] = []
    errors: list[BaseException] = []

    def run(tokens: Sequence[int]) -> None:
        try:
            p, d = pair.begin(contender, tokens, 1, str(uuid.uuid4()))
            p.result(ANSWER_S)
            ends.append(d.result(ANSWER_S))
            if ends[-1].token_ids != reference(tokens, 1, VOCAB):
                raise WrongTokens(f"{contender.name}: D gave {ends[-1].token_ids}; {pair.log_tail()}")
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(tokens,)) for tokens in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if any((out.external_cached_tokens or 0) < PROMPT - 1 for out in ends):
        raise RuntimeError(f"{contender.name}: D computed what should have come from P; {pair.log_tail()}")


def _check(decoders: Sequence[Request], number: int, contender: Contender) -> None:
    for i, decoder in enumerate(decoders):
        found = decoder.tokens_so_far
        if found != reference(_own(contender, number, i), len(found), VOCAB):
            raise WrongTokens(f"{contender.name}: a request that only decodes went wrong")
