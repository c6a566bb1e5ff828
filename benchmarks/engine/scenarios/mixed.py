# SPDX-License-Identifier: Apache-2.0
"""d: interactive prompts of 300 tokens beside summaries of 8,000, on one link. P has the summaries' texts in
its prefix cache, so that it is the link that they contend for, and not P's queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from benchmarks.engine.contenders import ESSENTIAL, KVPUSHD, PUSH, Contender
from benchmarks.engine.pair import Pair
from benchmarks.engine.scenarios.base import (
    D_CLOCK,
    FAST,
    P_CLOCK,
    Findings,
    calibrate,
    never_behind,
)
from benchmarks.engine.stage import Stage
from benchmarks.engine.trial import Ask, Trial, play, prompt
from benchmarks.report.statistics import percentile
from benchmarks.report.values import goal

_SHORT, _LONG = 300, 8000
_CHUNK = 2048
_SPACING_S = 0.35
_TEXTS = 2
_P95 = "interactive_ttft_p95_s"


class Mixed:
    """Plays d: each contender with the summaries, and alone."""

    def run(self, stage: Stage, findings: Findings) -> None:
        """As far as the job wants it."""
        if not stage.job.wants("d"):
            return
        calibrate(stage, findings, "d", 1.0)
        stage.configure(P_CLOCK, D_CLOCK, _CHUNK)
        count = 6 if stage.job.quick else 10
        findings.facts.append(
            f"d: {count} prompts of {_SHORT} tokens, {_SPACING_S} s apart, beside {_TEXTS} of {_LONG} that "
            f"arrive before the first, by up to {_SPACING_S} s, as long for all in a round; “alone” is the "
            "same without those"
        )
        texts = [prompt(_LONG, "d text", i) for i in range(_TEXTS)]
        played = (KVPUSHD, PUSH) if stage.job.quick else ESSENTIAL

        def turn(pair: Pair, contender: Contender, number: int) -> Trial:
            asks = _short(contender, number, count)
            if not contender.name.endswith(_ALONE):
                _remember(pair, texts)
                asks = [*(Ask(t, 8, kind="summary", moved=_LONG - 1) for t in texts), *asks]
            trial = play(pair, contender, asks)
            times = [sample.ttft for sample in trial.of("interactive")]
            return replace(trial, extra={_P95: percentile(times, 95)})

        stage.choose("d", turn)
        alone = {c: replace(c, name=c.name + _ALONE) for c in (KVPUSHD, PUSH)}
        rounds = stage.rounds("d", [*played, *alone.values()], turn, told=_P95)
        findings.rounds.append(rounds)
        findings.goals += never_behind(rounds)
        ratio = rounds.ratio(_P95, KVPUSHD, alone[KVPUSHD])
        what = f"p95 TTFT of the {_SHORT}-token prompts, mixed / alone"
        findings.goals.append(goal(7, what, "<=", 1.3, ratio, "d", KVPUSHD.name))
        shown = rounds.ratio(_P95, PUSH, alone[PUSH])
        findings.facts.append(
            f"d: {PUSH.name}, first come first served: {what} = {shown.value:.2f} "
            f"({shown.low:.2f} – {shown.high:.2f})"
        )


_ALONE = ", alone"


def _short(contender: Contender, number: int, count: int) -> list[Ask]:
    # Else one and the same would always come as a summary is about to end, or never.
    first = 0.1 + Random(f"d {number}").random() * _SPACING_S
    return [
        Ask(
            prompt(_SHORT, "d", contender.name, number, i),
            16,
            first + i * _SPACING_S,
            "interactive",
            _SHORT - 1,
        )
        for i in range(count)
    ]


def _remember(pair: Pair, texts: Sequence[Sequence[int]]) -> None:
    """P has the texts cached, D does not."""
    pair.d.reset_prefix_cache()
    pair.configure(p=FAST)
    for text in texts:
        pair.p.submit(text, 1).result(60)
    pair.configure(p=P_CLOCK)
