"""Pictures of many relations side by side, and of weights round by round."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from kinfed.errors import UsageError
from kinfed.plots.drawing import (
    INK,
    NORMAL,
    SMALL,
    by_round,
    legend,
    quiet,
    title,
    write,
)
from kinfed.plots.heatmaps import draw_relation, span


def relation_grid(
    panels: Mapping[tuple[str, str], ArrayLike], path: Path, groups: Mapping[str, ArrayLike] | None = None
) -> None:
    """A grid of relations, [N, N] each, by the names of every row and column; each in its own colours.

    `groups: [N]` by column: its clients are sorted by them, with lines between. Raises UsageError if they do not fit.
    """
    rows = list(dict.fromkeys(row for row, _ in panels))
    columns = list(dict.fromkeys(column for _, column in panels))
    figure = Figure(figsize=(1.9 * len(columns) + 0.6, 2.15 * len(rows) + 0.4), dpi=150, layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            axes = grid[i, j]
            axes.set_xticks([])
            axes.set_yticks([])
            weights = np.asarray(panels[row, column], dtype=np.float64)
            count = len(weights)
            labels = np.asarray((groups or {}).get(column, np.zeros(count, np.int64)))
            if weights.shape != (count, count) or labels.shape != (count,):
                raise UsageError(
                    f"the relation of {row}, {column} must be [N, N] with a group a client; got {list(weights.shape)} "
                    f"and {len(labels)} groups"
                )
            order = np.argsort(labels, kind="stable")
            draw_relation(axes, weights[np.ix_(order, order)], np.flatnonzero(np.diff(labels[order])) + 0.5)
            others = weights[~np.eye(count, dtype=bool)]
            own_weight = weights.diagonal().mean()
            axes.set_xlabel(f"{span(others)}\nown {own_weight:.2g}", fontsize=SMALL - 1, color=INK)
            if not i:
                axes.set_title(column, fontsize=NORMAL, color=INK)
            if not j:
                axes.set_ylabel(row, fontsize=NORMAL, color=INK)
    figure.suptitle(
        "rows receive, columns give; the own weight is grey, colours span all others,\n"
        "from the least to the greatest, which stand below",
        x=0.02,
        ha="left",
        fontsize=SMALL,
        color=INK,
    )
    write(figure, path)


def weights_by_round(rounds: ArrayLike, panels: Mapping[str, ArrayLike], layers: Sequence[str], path: Path) -> None:
    """A panel a kind of weight, a line a layer from shallow (pale) to deep (dark): each panel is [T, L] at rounds: [T].

    Raises UsageError if a panel is not [T, L].
    """
    at = np.asarray(rounds)
    figure = Figure(figsize=(2.3 * len(panels) + 1.1, 2.7), dpi=150, layout="constrained")
    shades = colormaps["viridis_r"](np.linspace(0.1, 1, len(layers)))
    lines: list[Line2D] = []
    for axes, (name, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        weights = np.asarray(panel, dtype=np.float64)
        if weights.shape != (len(at), len(layers)):
            raise UsageError(
                f"the weights of {name} must be [{len(at)}, {len(layers)}] for {len(at)} rounds and {len(layers)} "
                f"layers; got {list(weights.shape)}"
            )
        quiet(axes)
        lines = [
            axes.plot(at, weights[:, i], color=shades[i], linewidth=1.6, marker="o" if len(at) == 1 else "")[0]
            for i in range(len(layers))
        ]
        title(axes, name)
        by_round(axes, 5)
    every = math.ceil(len(layers) / 12)  # as many names as there is room for, the deepest among them
    for line, layer in zip(lines, layers, strict=True):
        line.set_label(layer)
    legend(axes, lines[::-1][::every][::-1])
    write(figure, path)
