# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles, and how sure a paired ratio is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """Two contenders compared over paired rounds: the median of the rounds' ratios (or differences), and the
    95 % interval.

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
    return _median_of(ratios, seed)


def paired_difference(minuends: Sequence[float], subtrahends: Sequence[float], seed: int = 7) -> Ratio:
    """`minuends[i] - subtrahends[i]`, where i is a round; median and interval as a ratio has them.

    Raises ValueError if the lengths differ, there is no round, or a value is not finite.
    """
    if len(minuends) != len(subtrahends) or not minuends:
        raise ValueError(f"{len(minuends)} minuends, {len(subtrahends)} subtrahends: rounds are pairs")
    differences = np.asarray(minuends, float) - np.asarray(subtrahends, float)
    if not np.isfinite(differences).all():
        raise ValueError(f"a difference needs finite values: {list(minuends)} - {list(subtrahends)}")
    return _median_of(differences, seed)


def _median_of(rounds: NDArray[np.float64], seed: int) -> Ratio:
    draws = np.random.default_rng(seed).integers(0, len(rounds), (RESAMPLES, len(rounds)))
    low, high = np.percentile(np.median(rounds[draws], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(rounds)), float(low), float(high), len(rounds))
