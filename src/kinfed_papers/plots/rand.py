"""The picture of how well clusters of clients are found, round by round."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from kinfed.errors import UsageError
from kinfed.plots.drawing import COLOURS, INK, by_round, legend, page, title, write


def rand_by_round(rounds: ArrayLike, curves: Mapping[str, ArrayLike], every: int, path: Path) -> None:
    """A line per topology: the Rand index by round, its means over seeds, and thin and dashed the adjusted one.

    `rounds: [T]` (from 1), each of found [S, T, 2] for S seeds; a band spans them. Every `every`-th round gets a mark.
    Raises UsageError if one of found is not [S, T, 2].
    """
    at = np.asarray(rounds)
    figure, axes = page(7.5, 4.2)
    lines = []
    for i, (label, values) in enumerate(curves.items()):
        index = np.asarray(values, dtype=np.float64)
        if index.ndim != 3 or index.shape[1:] != (len(at), 2) or not len(index):
            raise UsageError(f"the indices of {label} must be [S, {len(at)}, 2]; got {list(index.shape)}")
        colour, mean = COLOURS[i % len(COLOURS)], index.mean(0)
        marked = np.flatnonzero(at % every == 0).tolist()
        axes.fill_between(at, index[..., 0].min(0), index[..., 0].max(0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(at, mean[:, 1], "--", color=colour, linewidth=1)
        (line,) = axes.plot(at, mean[:, 0], color=colour, linewidth=1.8, marker="o", markersize=4, markevery=marked)
        line.set_label(label)
        lines.append(line)
    lines.append(Line2D([], [], color=INK, linestyle="--", linewidth=1, label="adjusted for chance"))
    axes.set_ylabel("Rand index")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03)
    by_round(axes)
    what = f"clusters against nodes; dots on every {every}th round, when each node sends its share"
    title(axes, f"{what}; bands hold all seeds" if len(index) > 1 else what)
    legend(axes, lines)
    write(figure, path)
