# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles, and how sure a paired ratio is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one measure: count, median, p95, p99, and the quartiles between which half of the samples lie."""

    count: int
    median: float
    p95: float
    p99: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two contenders over paired rounds: the median of the rounds' ratios, and the 95 % interval.

    `low` to `high` comes from resampling the rounds with replacement.
    """

    value: float
    low: float
    high: float
    rounds: int


def summary(samples: Sequence[float]) -> Summary:
    """Raises ValueError if there are no samples."""
    if not samples:
        raise ValueError("no samples: nothing to summarise")
    low, median, high, p95, p99 = (float(v) for v in np.percentile(samples, (25, 50, 75, 95, 99)))
    return Summary(len(samples), median, p95, p99, low, high)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Raises ValueError if there are no samples."""
    if not samples:
        raise ValueError("no samples: they have no percentile")
    return float(np.percentile(samples, percent))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 7) -> Ratio:
    """`numerators[i] / denominators[i]`, where i is a round.

    Raises ValueError if the lengths differ, there is no round, or a value is not positive and finite.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} numerators, {len(denominators)} denominators: rounds are pairs")
    if not all(math.isfinite(v) and v > 0 for v in (*numerators, *denominators)):
        raise ValueError(f"a ratio needs positive values: {list(numerators)} / {list(denominators)}")
    ratios = np.asarray(numerators, float) / np.asarray(denominators, float)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
