"""Pictures of a run, each a PNG drawn from plain arrays.

Figures are made without pyplot, so that drawing touches no global state and needs no display.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from ..files import replacing

Array = NDArray[Any]

# Okabe and Ito's colours, told apart with every common colour blindness; its yellow is too pale for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
DASHES, MARKS = ("-", "--", ":"), "osD^vP*"
INK, FAINT, OWN = "#333333", "#d9d9d9", "#c8c8c8"
SMALL, NORMAL, TITLE = 8.0, 9.5, 11.0  # points


def accuracy_by_round(
    rounds: ArrayLike,
    curves: Mapping[str, ArrayLike],
    metric: str,
    path: Path,
    selected: Mapping[str, int] | None = None,
) -> None:
    """A line a curve, the mean over clients, in a band that holds the middle half of them.

    `rounds: [T]`, each curve [T, N]; a metric whose name ends in accuracy is shown in percent. `selected` is the round
    that validation selects, by curve, and gets a dot. Raises UsageError if a curve is not [T, N].
    """
    at = np.asarray(rounds)
    figure, axes = _figure(7.5, 4.2)
    lines: list[tuple[float, Line2D]] = []
    for i, (label, curve) in enumerate(curves.items()):
        values = _scaled(curve, metric)  # [T, N]
        if values.ndim != 2 or len(values) != len(at) or not values.size:
            raise UsageError(
                f"the curve of {label} must be [{len(at)}, N] for {len(at)} rounds; got {list(values.shape)}"
            )
        colour, mean = COLOURS[i % len(COLOURS)], values.mean(1)
        low, high = np.quantile(values, [0.25, 0.75], axis=1)
        # Over a single round a band has no width but that of its edge.
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0 if len(at) > 1 else 5)
        dash = DASHES[i // len(COLOURS) % len(DASHES)]
        (line,) = axes.plot(at, mean, dash, color=colour, linewidth=1.8, marker="o" if len(at) == 1 else "")
        line.set_label(label)
        lines.append((float(mean[-1]), line))
        if selected and label in selected:
            best = int(np.flatnonzero(at == selected[label])[0])
            axes.plot(at[best], mean[best], "o", color=colour, markersize=8, markeredgecolor="white", zorder=5)
    axes.set_xlabel("round")
    axes.set_ylabel(_with_unit(metric))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.margins(x=0.02)
    what = "mean over clients, with the middle half of them" + ("; a dot on the selected round" if selected else "")
    axes.set_title(what, loc="left", fontsize=NORMAL, color=INK)
    if len(lines) > 1:
        _legend(axes, [line for _, line in sorted(lines, key=lambda ended: -ended[0])])  # as they end, top to bottom
    _write(figure, path)


def accuracy_by_client(scores: Mapping[str, ArrayLike], names: Sequence[str], metric: str, path: Path) -> None:
    """A column a client, a dot a score, clients sorted by the first of the scores.

    Each of the scores is [N], `names` are the clients'; a metric whose name ends in accuracy is shown in percent.
    Raises UsageError if the lengths differ.
    """
    values = {label: _scaled(score, metric) for label, score in scores.items()}
    for label, score in values.items():
        if score.shape != (len(names),):
            raise UsageError(
                f"the scores of {label} must be [{len(names)}] for {len(names)} clients; got {list(score.shape)}"
            )
    first = next(iter(values))
    order = np.argsort(values[first], kind="stable")
    table = np.stack(list(values.values()))[:, order]  # [labels, N]
    width = float(np.clip(len(names) * 0.22, 2.8, 9.5))
    figure, axes = _figure(width + 2.5, 4.2)
    x, step = np.arange(len(names)), 72 * width / len(names)  # points from client to client
    if len(values) > 1:
        axes.vlines(x, table.min(0), table.max(0), color=FAINT, linewidth=min(1.5, step / 5))
    dots = []
    for i, (label, row) in enumerate(zip(values, table, strict=True)):
        (dot,) = axes.plot(x, row, MARKS[i % len(MARKS)], color=COLOURS[i % len(COLOURS)], markeredgewidth=0)
        dot.set(markersize=float(np.clip(step / 2, 2.5, 6.5)), zorder=3 - i / len(values))  # the first on top
        dot.set_label(f"{label}, mean {_number(row.mean(), metric)}")
        dots.append(dot)
    axes.set_ylabel(_with_unit(metric))
    axes.set_xlim(-0.8, len(names) - 0.2)
    axes.set_xlabel(f"{len(names)} clients, sorted" + (f" by {first}" if len(values) > 1 else ""))
    if len(names) <= 60:
        _name_ticks(axes, "x", x, [names[i] for i in order], width)
    else:
        axes.set_xticks([])
    _legend(axes, dots)
    _write(figure, path)


def relation_heatmap(
    relation: ArrayLike,
    names: Sequence[str],
    origin: str,
    path: Path,
    groups: ArrayLike | None = None,
    layers: Sequence[str] = (),
) -> None:
    """Row i shows what client i receives of each other client; with [L, N, N] the mean, and a small panel a layer.

    `relation: [N, N]` or [L, N, N], `origin` given, learned or oracle, `groups: [N]` are the true groups, if known:
    clients are then sorted by them. Colours span the weights between different clients only, since a client's own
    weight may be far above or below them; it stands in grey, and in numbers beside the colour bar. Raises UsageError
    if the shapes do not fit.
    """
    weights = np.asarray(relation, dtype=np.float64)
    weights = weights[None] if weights.ndim == 2 else weights  # [L, N, N]
    count = len(names)
    labels = np.zeros(count, np.int64) if groups is None else np.asarray(groups)
    if weights.shape != (len(weights), count, count) or not weights.size:
        raise UsageError(
            f"the relation of {count} clients must be [{count}, {count}], or one a layer; got {list(weights.shape)}"
        )
    if len(labels) != count:
        raise UsageError(f"{count} clients need {count} group labels; got {len(labels)}")
    several = len(weights) > 1
    if several and layers and len(layers) != len(weights):
        raise UsageError(f"{len(weights)} layers need {len(weights)} names; got {len(layers)}")
    order = np.argsort(labels, kind="stable")
    weights, labels = weights[:, order][:, :, order], labels[order]
    borders = np.flatnonzero(np.diff(labels)) + 0.5

    side, columns = float(np.clip(count * 0.17, 4, 7)), 5
    tall, rows = side + 0.8, math.ceil(len(weights) / columns) if several else 0
    small = rows * ((side + 1.8) / columns + 0.35)
    figure = Figure(figsize=(side + 1.8, tall + small), dpi=150, layout="constrained")
    above: Figure | SubFigure = figure
    if several:
        grid = figure.add_gridspec(2, 1, height_ratios=[tall, small])
        above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        _layers(below, weights, layers or [f"layer {i + 1}" for i in range(len(weights))], borders, rows, columns)
    axes, mean = above.subplots(), weights.mean(0)
    image, own = _panel(axes, mean, borders), mean.diagonal()
    alike = np.ptp(own) < 5e-4 * abs(own).max()
    bar = above.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL, color=INK, labelcolor=INK)
    bar.set_label(
        "weight between different clients\n(own weight, in grey: " + (f"{own[0]:.3g})" if alike else f"{_range(own)})"),
        fontsize=NORMAL,
        color=INK,
    )
    axes.set_ylabel("receiving client", fontsize=NORMAL, color=INK)
    axes.set_xlabel("giving client" + ("" if groups is None else ", sorted by true group"), fontsize=NORMAL, color=INK)
    present = np.unique(labels)
    for which in ("x", "y"):
        if groups is None or count <= 40:
            _name_ticks(axes, which, np.arange(count), [names[i] for i in order], side)
        else:
            middles = np.array([np.flatnonzero(labels == group).mean() for group in present])
            _name_ticks(axes, which, middles, [f"group {group}" for group in present], side)
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
    what = "mean over layers" if several else "who receives from whom"
    axes.set_title(f"Relation between clients ({origin}): {what}", loc="left", fontsize=TITLE, color=INK)
    _write(figure, path)


def classes_by_client(counts: ArrayLike, class_names: Sequence[str], client_names: Sequence[str], path: Path) -> None:
    """A column a client, a row a class, a bubble whose area is the number of examples.

    `counts: [N, C]`. Raises UsageError if the names do not fit.
    """
    held = np.asarray(counts)
    clients, classes = len(client_names), len(class_names)
    if held.shape != (clients, classes) or not held.any():
        raise UsageError(
            f"the counts of {clients} clients and {classes} classes must be [{clients}, {classes}] and not all zero; "
            f"got {list(held.shape)}"
        )
    across = float(np.clip(9 / clients, 0.045, 0.45))
    up = float(np.clip(7 / classes, 0.045, min(0.32, max(0.15, 2 * across))))
    width, height = clients * across, classes * up
    # Laid out in inches, so that bubbles fit their cells whatever room the names take; `_write` trims the page.
    figure = Figure(figsize=(width + 3, height + 2), dpi=150)
    axes = figure.add_axes((1.5 / (width + 3), 1 / (height + 2), width / (width + 3), height / (height + 2)))
    _quiet(axes)
    axes.grid(axis="both", color=FAINT, linewidth=0.4)
    i, c = held.nonzero()
    # A few large counts would shrink all others to dust: they may outgrow their cells instead.
    usual = float(np.quantile(held[i, c], 0.98))
    area = (72 * 0.9) ** 2 * across * up / usual  # square points an example
    axes.scatter(i, c, s=np.maximum(area * held[i, c], 0.3), color=COLOURS[0], linewidths=0, alpha=0.8, zorder=3)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(classes - 0.3, -0.7)
    _name_ticks(axes, "x", np.arange(clients), client_names, width)
    _name_ticks(axes, "y", np.arange(classes), class_names, height)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    sizes = _round_sizes(int(held.max()))
    bubbles = [
        Line2D([], [], linestyle="", marker="o", color=COLOURS[0], markeredgewidth=0, alpha=0.8, label=f"{size:,}")
        for size in sizes
    ]
    for bubble, size in zip(bubbles, sizes, strict=True):
        bubble.set_markersize(math.sqrt(area * size))
    widest = math.sqrt(area * sizes[-1])
    _legend(axes, bubbles, title="examples", labelspacing=max(0.5, 0.7 * widest / SMALL), handlelength=widest / SMALL)
    _write(figure, path)


def _layers(figure: SubFigure, weights: Array, names: Sequence[str], borders: Array, rows: int, columns: int) -> None:
    """A small panel a layer of weights: [L, N, N], each in its own colours, for layers differ in scale."""
    figure.suptitle(
        "layer by layer, each in its own colours: least and greatest weight between different clients",
        x=0.02,
        ha="left",
        fontsize=SMALL,
        color=INK,
    )
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    others = ~np.eye(weights.shape[1], dtype=bool)
    for axes in panels:
        axes.set_visible(False)
    for axes, name, layer in zip(panels, names, weights, strict=False):
        axes.set_visible(True)
        _panel(axes, layer, borders)
        axes.set_title(f"{name}\n{_range(layer[others])}", fontsize=SMALL - 1.5, color=INK)
        axes.set_xticks([])
        axes.set_yticks([])


def _panel(axes: Axes, weights: Array, borders: Array) -> AxesImage:
    """Draw one relation [N, N], in colours for the others and in grey for the client itself."""
    itself = np.eye(len(weights), dtype=bool)
    others = weights[~itself] if len(weights) > 1 else np.zeros(1)
    low, high = float(others.min()), float(others.max())
    if high - low <= 1e-5 * abs(high):  # alike but for rounding, which must not look like structure
        low, high = 0.0, 2 * high or 1.0
    shown = np.ma.masked_where(itself, weights)
    image = axes.imshow(shown, cmap="YlGnBu", vmin=low, vmax=high, interpolation="nearest")
    axes.set_facecolor(OWN)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    for border in borders:
        axes.axhline(border, color=INK, linewidth=0.6)
        axes.axvline(border, color=INK, linewidth=0.6)
    return image


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    _quiet(axes)
    return figure, axes


def _quiet(axes: Axes) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelcolor=INK, color=FAINT, length=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(NORMAL)
        axis.label.set_color(INK)


def _name_ticks(axes: Axes, which: Literal["x", "y"], at: Array, names: Sequence[str], inches: float) -> None:
    """Name the positions along an axis of this length, upright if need be, or as many of them as there is room for."""
    step = inches / len(names)
    flat = 0.07 * max(map(len, names)) + 0.05  # inches that the longest name takes when written along the axis
    upright = which == "x" and flat > step and (max(map(len, names)) > 3 or step > 0.14)
    need = flat if which == "x" and not upright else 0.14
    every = next((s for s in (1, 2, 5, 10, 20, 50) if s * step >= need), 100)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(at[::every].tolist(), list(names[::every]))
    axes.tick_params(axis=which, labelrotation=90 if upright else 0)


def _legend(axes: Axes, handles: Sequence[Line2D], **how: Any) -> None:
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


def _is_share(metric: str) -> bool:
    return metric.endswith("accuracy")


def _scaled(values: ArrayLike, metric: str) -> Array:
    return np.asarray(values, dtype=np.float64) * (100 if _is_share(metric) else 1)


def _with_unit(metric: str) -> str:
    return f"{metric} (%)" if _is_share(metric) else metric


def _number(value: float, metric: str) -> str:
    return f"{value:.1f} %" if _is_share(metric) else f"{value:.3g}"


def _range(values: Array) -> str:
    return f"{values.min():.2g} to {values.max():.2g}" if values.size else "no other client"


def _round_sizes(largest: int) -> list[int]:
    """Up to three round numbers for a legend, ascending, none above the largest."""
    sizes = [m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5) if m * 10**e <= largest]
    return sizes[::-2][:3][::-1]


def _write(figure: Figure, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format="png", bbox_inches="tight", pad_inches=0.12)
