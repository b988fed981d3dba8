"""Pictures of scores by name, over one setting, over two, and over shares of attackers."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from kinfed.plots.drawing import (
    COLOURS,
    DASHES,
    FAINT,
    INK,
    NORMAL,
    SMALL,
    Array,
    label_bar,
    legend,
    name_ticks,
    number,
    page,
    quiet,
    scale_metric,
    title,
    with_unit,
    write,
)
from kinfed.plots.lettering import literal
from kinfed.verdict.statistics import is_share


def score_by_name(scores: Mapping[str, ArrayLike], metric: str, what: str, path: Path) -> None:
    """A row per name, a dot on the mean over seeds, and a small dot per seed: each of the scores is [S].

    `what` says above the picture what is compared; a metric whose name ends in accuracy is shown in percent.
    """
    figure, axes = page(6, 0.9 + 0.34 * len(scores))
    for y, values in enumerate(scale_metric(score, metric) for score in scores.values()):
        _dots(axes, y, values, 9)
        label = (values.mean(), y), (0, 7)
        axes.annotate(number(float(values.mean()), metric), *label, textcoords="offset points", **_ABOVE)
    axes.set_ylim(len(scores) - 0.5, -0.75)
    axes.margins(x=0.08)
    axes.set_yticks(range(len(scores)), list(map(literal, scores)))
    axes.set_xlabel(with_unit(metric))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    title(axes, what + ("; small dots: seeds" if max(map(np.size, scores.values())) > 1 else ""))
    write(figure, path)


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
            _dots(axes, y, scale_metric(scores[source], metric), 7)
        axes.set_yticks(range(len(sources)), list(map(literal, sources)))
        axes.set_ylim(len(sources) - 0.5, -0.5)
        title(axes, name)
    several = any(np.size(scores[source]) > 1 for scores in panels.values() for source in sources)
    label = with_unit(metric) + ("; small dots: seeds" if several else "")
    figure.supxlabel(label, fontsize=NORMAL, color=INK)
    write(figure, path)


def _dots(axes: Axes, y: int, values: Array, size: float) -> None:
    """Draw a row of scores: [S] of seeds as small dots on a bar that holds them all, and their mean as a large dot."""
    if len(values) > 1:
        axes.plot([values.min(), values.max()], [y, y], color=FAINT, linewidth=4, solid_capstyle="round", zorder=1)
        axes.plot(values, np.full(len(values), y), "o", color=COLOURS[0], markersize=0.4 * size, alpha=0.6, zorder=2)
    axes.plot(values.mean(), y, "o", color=COLOURS[0], markersize=size, markeredgecolor="white", zorder=3)


def score_by_setting(
    names: Sequence[str], scores: ArrayLike, setting: str, metric: str, path: Path, chosen: int | None = None
) -> None:
    """A line over the values of a setting, with a bar from the worst to the best seed: `scores: [X, S]`.

    `names: [X]` are the values, evenly spaced as they are listed; `chosen` is the one that validation prefers.
    """
    values = scale_metric(scores, metric)
    at, mean = np.arange(len(names)), values.mean(1)
    figure, axes = page(5.5, 3.6)
    axes.vlines(at, values.min(1), values.max(1), color=COLOURS[0], alpha=0.3, linewidth=4)
    axes.plot(at, mean, "o-", color=COLOURS[0], linewidth=1.8, markersize=5)
    if chosen is not None:
        axes.plot(at[chosen], mean[chosen], "o", color=COLOURS[1], markersize=10, zorder=4)
    axes.margins(x=0.06)
    name_ticks(axes, "x", at, names, 4.5)
    axes.set_xlabel(setting)
    axes.set_ylabel(with_unit(metric))
    several = f" over {values.shape[1]} seeds, with their range" if values.shape[1] > 1 else ""
    title(axes, f"mean{several}" + ("" if chosen is None else "; large dot: best on validation data"))
    write(figure, path)


def scores_by_share(
    shares: Sequence[float], panels: Mapping[str, Mapping[str, ArrayLike]], metric: str, path: Path
) -> None:
    """A panel a kind of attack, a line a method over shares of clients: [X]; scores are [X], as they are shown."""
    figure = Figure(figsize=(3.1 * len(panels) + 1.3, 3), dpi=150, layout="constrained")
    lines: list[Line2D] = []
    for axes, (kind, scores) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        quiet(axes)
        lines = [
            axes.plot(
                shares,
                values,
                marker="o",
                linestyle=DASHES[i // len(COLOURS) % len(DASHES)],
                color=COLOURS[i % len(COLOURS)],
                linewidth=1.6,
                markersize=4,
                label=name,
            )[0]
            for i, (name, values) in enumerate(scores.items())
        ]
        axes.set_xlabel("share of clients that attack")
        axes.set_ylabel(with_unit(metric))
        title(axes, literal(kind))
    legend(axes, lines)
    write(figure, path)


_ABOVE: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": SMALL, "color": INK}


def score_grid(
    scores: ArrayLike,
    across: tuple[str, Sequence[str]],
    up: tuple[str, Sequence[str]],
    metric: str,
    path: Path,
    chosen: tuple[int, int] | None,
) -> None:
    """Scores [X, Y] over two settings, each given as its name and its values, as colours and in numbers.

    `chosen` is where validation is best. A metric whose name ends in accuracy is shown in percent.
    """
    values = scale_metric(scores, metric).T  # [Y, X]
    (x, xs), (y, ys) = across, up
    width, height = 0.75 * len(xs) + 0.6, 0.5 * len(ys) + 0.4
    figure, axes = page(width + 1.6, height + 0.7)
    axes.grid(False)
    image = axes.imshow(values, cmap="YlGnBu", origin="lower", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (j, i), value in np.ndenumerate(values):
        if math.isnan(value):  # that run failed
            continue
        colour = "white" if value > middle else INK
        label = f"{value:.1f}" if is_share(metric) else f"{value:.3g}"
        axes.text(i, j, label, ha="center", va="center", fontsize=NORMAL, color=colour)
    if chosen is not None:
        corner = (chosen[0] - 0.5, chosen[1] - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=COLOURS[1], linewidth=2.5, clip_on=False))
        title(axes, "frame: best on validation data")
    name_ticks(axes, "x", np.arange(len(xs)), xs, width)
    name_ticks(axes, "y", np.arange(len(ys)), ys, height)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    label_bar(figure.colorbar(image, ax=axes, pad=0.03), with_unit(metric))
    write(figure, path)
