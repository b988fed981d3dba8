"""The picture of clients that never train, by the source of their models."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .drawing import COLOURS, FAINT, INK, NORMAL, quiet, scaled, title, with_unit, write
from .lettering import literal


def score_by_source(panels: Mapping[str, Mapping[str, ArrayLike]], metric: str, path: Path) -> None:
    """A panel per share of clients held back, a row per source of models, a dot on the mean and a small one per seed.

    Each of the scores is [S]; all panels have the same sources.
    """
    sources = list(next(iter(panels.values())))
    figure = Figure(figsize=(1.8 + 2.2 * len(panels), 1.1 + 0.26 * len(sources)), dpi=150, layout="constrained")
    for axes, (name, scores) in zip(
        figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        quiet(axes)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        for y, source in enumerate(sources):
            values = scaled(scores[source], metric)
            axes.plot([values.min(), values.max()], [y, y], color=FAINT, linewidth=4, solid_capstyle="round", zorder=1)
            if len(values) > 1:
                axes.plot(values, np.full(len(values), y), "o", color=COLOURS[0], markersize=3, alpha=0.6, zorder=2)
            axes.plot(values.mean(), y, "o", color=COLOURS[0], markersize=7, markeredgecolor="white", zorder=3)
        axes.set_yticks(range(len(sources)), list(map(literal, sources)))
        axes.set_ylim(len(sources) - 0.5, -0.5)
        title(axes, name)
    several = any(np.size(scores[source]) > 1 for scores in panels.values() for source in sources)
    label = with_unit(metric) + ("; small dots: seeds" if several else "")
    figure.supxlabel(label, fontsize=NORMAL, color=INK)
    write(figure, path)
