"""The critical-difference diagram of Demšar (2006, JMLR 7, 1-30): mean ranks on a line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .drawing import COLOURS, FAINT, INK, NORMAL, SMALL, write

LINE, BAR = 0.26, 0.13  # inches between names, and between bars
LETTER, LENGTH = 0.085, 4.6  # inches for a letter of a name on either side, and of the axis


def critical_difference(
    names: Sequence[str], ranks: ArrayLike, critical: float, groups: Sequence[Sequence[int]], path: Path
) -> None:
    """A line from the first rank to the last with each method's mean rank: [k], 1 is best and on the left.

    `groups` are positions of methods that do not differ, each joined by a bar; `critical` is drawn to scale above.
    """
    mean = np.asarray(ranks, np.float64)
    order = np.argsort(mean, kind="stable")
    low, high = 1, max(2, len(order))
    half = -(-len(order) // 2)
    under = BAR * len(groups) + 0.14  # inches from the axis to the first name
    height = 0.75 + under + LINE * half
    side = 0.75 + LETTER * max(map(len, names))
    width = LENGTH + 2 * side
    figure = Figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(under + LINE * half, -0.75))  # inches, and those below the axis

    def place_at(rank: float) -> float:
        return float(side + LENGTH * (rank - low) / (high - low))

    axes.plot([place_at(low), place_at(high)], [0, 0], color=INK, linewidth=1)
    for rank in range(low, high + 1):
        axes.plot([place_at(rank)] * 2, [0, -0.07], color=INK, linewidth=1)
        axes.text(place_at(rank), -0.1, str(rank), ha="center", va="bottom", fontsize=SMALL, color=INK)
    span = min(critical, high - low)
    axes.plot([place_at(low), place_at(low + span)], [-0.42] * 2, color=INK, linewidth=1.2)
    for end in [place_at(low), place_at(low + span)] if span == critical else [place_at(low)]:
        axes.plot([end] * 2, [-0.47, -0.37], color=INK, linewidth=1.2)
    note = f"critical difference {critical:.2f}"
    axes.text(place_at(low + span / 2), -0.47, note, ha="center", va="bottom", fontsize=SMALL, color=INK)
    for place, i in enumerate(order):
        left = place < half
        y = under + LINE * ((place if left else len(order) - 1 - place) + 0.3)
        end = side - 0.12 if left else side + LENGTH + 0.12
        axes.plot([place_at(mean[i]), place_at(mean[i]), end], [0, y, y], color=FAINT, linewidth=1.1, zorder=1)
        axes.plot(place_at(mean[i]), 0, "o", color=COLOURS[0], markersize=5, markeredgecolor="white", zorder=4)
        label = f"{names[i]}  {mean[i]:.2f}" if left else f"{mean[i]:.2f}  {names[i]}"
        way: Literal["left", "right"] = "right" if left else "left"
        axes.text(end + (-0.06 if left else 0.06), y, label, ha=way, va="center", fontsize=NORMAL, color=INK)
    for place, group in enumerate(groups):
        ends = [place_at(min(mean[list(group)])) - 0.05, place_at(max(mean[list(group)])) + 0.05]
        y = 0.12 + BAR * place
        axes.plot(ends, [y, y], color=COLOURS[1], linewidth=3.5, solid_capstyle="round", zorder=3)
    write(figure, path)
