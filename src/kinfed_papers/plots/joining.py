"""The picture of clients that join late, beside those that take part from the start."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from kinfed.errors import UsageError
from kinfed.plots.drawing import COLOURS, INK, NORMAL, SMALL, by_round, quiet, scale_metric, title, with_unit, write

LINES = {
    "early clients": COLOURS[0],
    "late clients": COLOURS[1],
    "late clients, had they been there from the start": COLOURS[6],
}


def early_and_late(
    rounds: ArrayLike, panels: Mapping[str, Mapping[str, ArrayLike]], joins: int, metric: str, path: Path
) -> None:
    """A panel per method with the LINES over rounds: [T], each of them [S, T], in a band that holds all S seeds.

    After round `joins`, where an upright line stands, the late clients join; theirs is dotted before, where it shows
    what they would be sent. Raises UsageError if a line is not [S, T].
    """
    at = np.asarray(rounds)
    columns = min(3, len(panels))
    tall = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.8 * columns + 0.8, 2.4 * tall + 0.6), dpi=150, layout="constrained")
    grid = figure.subplots(tall, columns, sharex=True, sharey=True, squeeze=False)
    shown = {}
    for axes, (name, lines) in zip(grid.ravel(), panels.items(), strict=False):
        quiet(axes)
        axes.axvline(joins + 0.5, color=INK, linewidth=0.8)
        above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom", "fontsize": SMALL}
        axes.annotate("they join", (joins + 0.5, 1), color=INK, **above)
        for label, colour in reversed(LINES.items()):  # the first on top
            values = scale_metric(lines[label], metric)
            if values.ndim != 2 or values.shape[1] != len(at) or not values.size:
                raise UsageError(f"{name}, {label}: a line must be [S, {len(at)}]; got {list(values.shape)}")
            mean = values.mean(0)
            joined = at > joins if label == "late clients" else np.ones_like(at, dtype=bool)
            axes.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0)
            axes.plot(at[~joined], mean[~joined], ":", color=colour, linewidth=1.5)
            width = 1 if "had they" in label else 1.8
            (shown[label],) = axes.plot(at[joined], mean[joined], color=colour, linewidth=width, label=label)
        title(axes, name)
        by_round(axes, most=5)
    for place, axes in enumerate(grid.ravel()):
        axes.set_visible(place < len(panels))
        axes.label_outer()
        # Above an empty place the rounds must be labelled on the panel above.
        if len(panels) - columns <= place < len(panels):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("round")
    figure.supylabel(with_unit(metric), fontsize=NORMAL, color=INK)
    dots = Line2D([], [], linestyle=":", color=LINES["late clients"], linewidth=1.5, label="what they would be sent")
    figure.legend(
        handles=[*(shown[label] for label in LINES), dots],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
    )
    write(figure, path)
