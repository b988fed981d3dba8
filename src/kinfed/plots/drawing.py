"""How kinfed's pictures look: colours, sizes, axes, legends, units. Figures are made without pyplot.

So drawing touches no global state and needs no display.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from ..files import replacing
from ..verdict.statistics import is_share
from .lettering import choose_fonts, literal

Array = NDArray[Any]

# Okabe and Ito's colours, distinguishable with every common colour blindness; its yellow is too pale for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
DASHES, MARKS = ("-", "--", ":"), "osD^vP*"
INK, FAINT, OWN = "#333333", "#d9d9d9", "#c8c8c8"
SMALL, NORMAL, TITLE = 8.0, 9.5, 11.0  # points
MOST = 400  # clients in a picture with a column for each
LONGEST = 20  # characters of a name along an axis


def page(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size in inches with one pair of axes."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    quiet(axes)
    return figure, axes


def quiet(axes: Axes) -> None:
    """Remove the frame and most of the lines from a pair of axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelcolor=INK, color=FAINT, length=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(NORMAL)
        axis.label.set_color(INK)


def title(axes: Axes, text: str) -> None:
    """What a picture shows, above its axes."""
    axes.set_title(text, loc="left", fontsize=NORMAL, color=INK)


def by_round(axes: Axes, most: int = 8) -> None:
    """Rounds on the horizontal axis, with a limited number of labels."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.margins(x=0.02)


def name_ticks(axes: Axes, which: Literal["x", "y"], at: Array, names: Sequence[str], inches: float) -> None:
    """Name the positions along an axis of this length, upright if need be, or as many of them as there is room for.

    Of long names the middle is left out.
    """
    names = [literal(name if len(name) <= LONGEST else f"{name[: LONGEST - 7]}…{name[-6:]}") for name in names]
    step = inches / len(names)
    flat = 0.07 * max(map(len, names)) + 0.05  # inches that the longest name takes when written along the axis
    upright = which == "x" and flat > step and (max(map(len, names)) > 3 or step > 0.14)
    need = flat if which == "x" and not upright else 0.14
    every = next((s for s in (1, 2, 5, 10, 20, 50) if s * step >= need), 100)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(at[::every].tolist(), list(names[::every]))
    axes.tick_params(axis=which, labelrotation=90 if upright else 0)


def legend(axes: Axes, handles: Sequence[Line2D], **how: Any) -> None:
    """A legend to the right of the axes."""
    legend = axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        **how,
    )
    legend.get_title().set(fontsize=SMALL, color=INK)


def label_bar(bar: Colorbar, label: str) -> None:
    """What a bar of colours stands for, beside it."""
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL, color=INK, labelcolor=INK)
    bar.set_label(label, fontsize=NORMAL, color=INK)


def sample_clients(count: int) -> tuple[NDArray[np.int64], str]:
    """[n] the positions of clients that a picture with a column for each shows, evenly chosen; and what these are."""
    if count <= MOST:
        return np.arange(count), "client"
    return np.linspace(0, count - 1, MOST).round().astype(np.int64), f"{MOST} of {count:,} clients"


def scale_metric(values: ArrayLike, metric: str) -> Array:
    """Values of a metric as they are shown: in percent, if it is a share."""
    return np.asarray(values, dtype=np.float64) * (100 if is_share(metric) else 1)


def with_unit(metric: str) -> str:
    """A metric's name with its unit."""
    return f"{metric} (%)" if is_share(metric) else metric


def number(value: float, metric: str) -> str:
    """A value as it is shown, with its unit."""
    return f"{value:.1f} %" if is_share(metric) else f"{value:.3g}"


def write(figure: Figure, path: Path) -> None:
    """Write a picture, completely or not at all."""
    with replacing(path) as part, choose_fonts(figure):
        figure.savefig(part, format="png", bbox_inches="tight", pad_inches=0.12)
