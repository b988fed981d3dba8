"""Heat maps: relations between clients, and recall by client and class."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from ..verdict.graph_quality import order_by_links
from .drawing import (
    FAINT,
    INK,
    LONGEST,
    MOST,
    NORMAL,
    OWN,
    SMALL,
    TITLE,
    Array,
    label_bar,
    name_ticks,
    page,
    sample_clients,
    title,
    write,
)
from .lettering import number_illegible


def relation_heatmap(
    relation: ArrayLike,
    names: Sequence[str],
    origin: str,
    path: Path,
    groups: ArrayLike | None = None,
    layers: Sequence[str] = (),
) -> None:
    """Row i shows what client i receives of each other client; with [L, N, N] the mean, and a small panel per layer.

    `relation: [N, N]` or [L, N, N], `origin` as of a `Graph`, `groups: [N]` are the true groups, if known: clients are
    then sorted by them, and else so that those who learn from each other stand together. Colours span the weights
    between different clients only, since a client's own weight may be far above or below them; it stands in grey, and
    in numbers beside the colour bar. Raises UsageError if the shapes do not fit.
    """
    weights, labels, order = _sort_relation(relation, len(names), groups, layers)
    borders = np.flatnonzero(np.diff(labels)) + 0.5
    count, several, names = len(names), len(weights) > 1, number_illegible(names)

    side, columns = float(np.clip(count * 0.17, 4, 7)), 5
    tall, rows = side + 0.8, math.ceil(len(weights) / columns) if several else 0
    small = rows * ((side + 1.8) / columns + 0.35)
    figure = Figure(figsize=(side + 1.8, tall + small), dpi=150, layout="constrained")
    above: Figure | SubFigure = figure
    if several:
        grid = figure.add_gridspec(2, 1, height_ratios=[tall, small])
        above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        called = [f"layer {name}" if name.isdecimal() else name for name in layers]  # those of an nn.Sequential
        called = called or [f"layer {i + 1}" for i in range(len(weights))]
        _layers(below, weights, called, borders, rows, columns)
    axes = above.subplots()
    mean = weights.mean(0)
    image, self_weight = draw_relation(axes, mean, borders), mean.diagonal()
    itself = f"{self_weight[0]:.3g}" if np.ptp(self_weight) < 5e-4 * abs(self_weight).max() else span(self_weight)
    label = f"weight between different clients\n(own weight, in grey: {itself})"
    label_bar(above.colorbar(image, ax=axes, shrink=0.8, pad=0.02), label)
    axes.set_ylabel("receiving client", fontsize=NORMAL, color=INK)
    by = "by links" if groups is None else "by true group"
    axes.set_xlabel(f"giving client, sorted {by}", fontsize=NORMAL, color=INK)
    for which in ("x", "y"):
        if groups is None or count <= 40:
            name_ticks(axes, which, np.arange(count), [names[i] for i in order], side)
        else:
            present = np.unique(labels)
            middles = np.array([np.flatnonzero(labels == group).mean() for group in present])
            name_ticks(axes, which, middles, [f"group {group}" for group in present], side)
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
    what = "mean over layers" if several else "who receives from whom"
    axes.set_title(f"Relation between clients ({origin}): {what}", loc="left", fontsize=TITLE, color=INK)
    write(figure, path)


def _sort_relation(
    relation: ArrayLike, count: int, groups: ArrayLike | None, layers: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Weights: [L, N, N] and labels: [N] sorted by group or else by links, and that order.

    Raises UsageError if shapes do not fit.
    """
    weights = np.asarray(relation, dtype=np.float64)
    weights = weights[None] if weights.ndim == 2 else weights
    labels = np.zeros(count, np.int64) if groups is None else np.asarray(groups)
    if weights.shape != (len(weights), count, count) or not weights.size:
        raise UsageError(
            f"the relation of {count} clients must be [{count}, {count}], or one a layer; got {list(weights.shape)}"
        )
    if len(labels) != count:
        raise UsageError(f"{count} clients need {count} group labels; got {len(labels)}")
    if len(weights) > 1 and layers and len(layers) != len(weights):
        raise UsageError(f"{len(weights)} layers need {len(weights)} names; got {len(layers)}")
    links = order_by_links(weights.mean(0)) if groups is None and count <= MOST else np.arange(count)
    order = links[np.argsort(labels[links], kind="stable")]
    return weights[:, order][:, :, order], labels[order], order


def recall_heatmap(
    recall: ArrayLike, pooled: ArrayLike, class_names: Sequence[str], client_names: Sequence[str], what: str, path: Path
) -> None:
    """A column per client, a row per class, in percent: `recall: [N, C]`; first all clients together, `pooled: [C]`.

    NaN, where there are no examples, is grey. Of very many clients some are shown, evenly chosen. Raises UsageError if
    the names do not fit.
    """
    percent = 100 * np.asarray(recall, np.float64)
    pooled_percent = 100 * np.asarray(pooled, np.float64)
    clients, classes = len(client_names), len(class_names)
    if percent.shape != (clients, classes) or pooled_percent.shape != (classes,):
        raise UsageError(
            f"the recall of {clients} clients and {classes} classes must be [{clients}, {classes}] and [{classes}]; "
            f"got {list(percent.shape)} and {list(pooled_percent.shape)}"
        )
    client_names = number_illegible(client_names)
    class_names = number_illegible(class_names)
    shown, label = sample_clients(clients)
    clients = len(shown)
    client_names = [client_names[i] for i in shown]
    percent = percent[shown]
    longest = 0.05 + 0.07 * min(LONGEST, max(map(len, client_names)))  # inches that a name takes
    across = float(np.clip(9 / clients, 0.02, max(0.5, longest)))
    up = float(np.clip(7 / classes, 0.06, 0.45))
    first, gap = max(1.0, 0.4 / across), 0.12 / across  # columns that all clients together take, and what parts them
    width, height = (clients + first + gap) * across, classes * up
    figure, axes = page(width + 2.4, height + 1.2 + longest * (across < longest))
    axes.grid(False)
    axes.set_facecolor(OWN)
    ahead, named = -0.5 - gap - first, min(across, up) >= 0.25 and across >= 0.35
    for edges, values in (
        (np.arange(clients + 1) - 0.5, percent.T),
        (np.array([ahead, ahead + first]), pooled_percent[:, None]),
    ):
        shades = axes.pcolormesh(
            edges, np.arange(classes + 1) - 0.5, np.ma.masked_invalid(values), cmap="YlGnBu", vmin=0, vmax=100
        )
        for (j, i), value in np.ndenumerate(values):
            if np.isfinite(value) and (named or (values.shape[1] == 1 and up >= 0.2)):
                at, colour = (edges[i] + edges[i + 1]) / 2, "white" if value > 55 else INK
                axes.text(at, j, f"{value:.0f}", ha="center", va="center", fontsize=SMALL, color=colour)
    axes.axvspan(ahead + first, -0.5, color="white")
    axes.set(xlim=(ahead, clients - 0.5), ylim=(classes - 0.5, -0.5), xlabel=label, ylabel="class")
    axes.spines[:].set_visible(False)
    name_ticks(axes, "x", np.arange(clients), client_names, clients * across)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    axes.set_xticks([ahead + first / 2, *axes.get_xticks()], ["all", *labels])
    name_ticks(axes, "y", np.arange(classes), class_names, height)
    axes.tick_params(length=0)
    title(axes, what + ("; grey: no examples" if np.isnan(percent).any() else ""))
    aspect = max(8, 20 * height / 3)
    label_bar(figure.colorbar(shades, ax=axes, pad=0.02, ticks=[0, 50, 100], aspect=aspect), "recall (%)")
    write(figure, path)


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
    for axes in panels[len(weights) :]:
        axes.set_visible(False)
    for axes, name, layer in zip(panels, names, weights, strict=False):
        draw_relation(axes, layer, borders)
        axes.set_title(f"{name}\n{span(layer[others])}", fontsize=SMALL - 1.5, color=INK)
        axes.set(xticks=[], yticks=[])


def draw_relation(axes: Axes, weights: Array, borders: Array) -> AxesImage:
    """Draw one relation [N, N], in colours for the others and in grey for the client itself."""
    itself = np.eye(len(weights), dtype=bool)
    others = weights[~itself] if len(weights) > 1 else np.zeros(1)
    low, high = float(others.min()), float(others.max())
    if high - low <= 1e-5 * abs(high):  # alike but for rounding, which must not look like structure
        low, high = 0.0, 2 * high or 1.0
    if abs(others).max() < 1e-7 * abs(weights).max():  # nothing beside the clients' own weights, but for rounding
        low, high = 0.0, float(weights.max())
    shown = np.ma.masked_where(itself, weights)
    image = axes.imshow(shown, cmap="YlGnBu", vmin=low, vmax=high, interpolation="nearest")
    axes.set_facecolor(OWN)
    axes.spines[:].set_color(FAINT)
    for border in borders:
        axes.axhline(border, color=INK, linewidth=0.6)
        axes.axvline(border, color=INK, linewidth=0.6)
    return image


def span(values: Array) -> str:
    """The least and the greatest of the values, in words."""
    return f"{values.min():.2g} to {values.max():.2g}" if values.size else "no other client"
