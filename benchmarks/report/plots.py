# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.report.values import Bars, Lines

matplotlib.use("agg")

from matplotlib import pyplot as plt


def draw(plot: Bars | Lines, folder: Path) -> Path:
    """Writes one PNG; returns where."""
    figure, axes = plt.subplots(figsize=(9, 4.5), dpi=120)
    if isinstance(plot, Bars):
        _bars(plot, axes)
    else:
        _lines(plot, axes)
    axes.set_title(plot.title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    path = folder / f"{plot.name}.png"
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path


def _bars(plot: Bars, axes: Any) -> None:
    width = 0.8 / max(1, len(plot.series))
    places = np.arange(len(plot.labels))
    for index, (name, bars) in enumerate(plot.series.items()):
        there = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar is not None]
        middle = [bar[0] for _, bar in there]
        errors = [[bar[0] - bar[1] for _, bar in there], [bar[2] - bar[0] for _, bar in there]]
        left = [place + (index - (len(plot.series) - 1) / 2) * width for place, _ in there]
        axes.bar(left, middle, width, yerr=errors, label=name, capsize=2, error_kw={"lw": 0.8})
    axes.set_xticks(places, plot.labels)
    axes.set_ylabel(plot.unit)


def _lines(plot: Lines, axes: Any) -> None:
    for name, points in plot.series.items():
        ordered = sorted(points)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", label=name)
    if plot.log:
        axes.set_xscale("log")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.set_ylim(bottom=0)
