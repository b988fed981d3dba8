"""Pictures of scores and of how targets are distributed, each a PNG drawn from plain arrays."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from ..errors import UsageError
from .drawing import (
    COLOURS,
    DASHES,
    FAINT,
    INK,
    MARKS,
    SMALL,
    by_round,
    legend,
    name_ticks,
    number,
    page,
    quiet,
    sample_clients,
    scale_metric,
    title,
    with_unit,
    write,
)
from .lettering import number_illegible


def accuracy_by_round(
    rounds: ArrayLike,
    curves: Mapping[str, ArrayLike],
    metric: str,
    path: Path,
    selected: Mapping[str, int] | None = None,
    over: Literal["clients", "seeds"] = "clients",
    target: float | None = None,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """A line per curve, the mean over clients, in a band with the middle half of them; or all seeds.

    `rounds: [T]`, each curve [T, N], or [T, S] over seeds, each entry a mean over clients; a metric whose name ends in
    accuracy is shown in percent. `selected` is the round that validation selects, by curve, and gets a dot; `target`
    a score to reach, and `kinds` what a curve is, in words. Raises UsageError if a curve is not [T, N].
    """
    at = np.asarray(rounds)
    figure, axes = page(7.5, 4.2)
    lines: list[tuple[float, Line2D]] = []
    for i, (label, curve) in enumerate(curves.items()):
        values = scale_metric(curve, metric)  # [T, N]
        if values.ndim != 2 or len(values) != len(at) or not values.size:
            raise UsageError(
                f"the curve of {label} must be [{len(at)}, N] for {len(at)} rounds; got {list(values.shape)}"
            )
        colour, mean = COLOURS[i % len(COLOURS)], np.nanmean(values, 1)  # a client that came later has none
        low, high = np.nanquantile(values, [0.25, 0.75] if over == "clients" else [0, 1], axis=1)
        # Over a single round a band has no width but that of its edge.
        # Where bands lie upon each other, their edges tell whose is whose.
        edge = 0.7 if len(curves) > 1 else 0.0
        edge = 5.0 if len(at) == 1 else edge
        seen = 0.1 if len(at) == 1 else 0.45
        axes.fill_between(at, low, high, linewidth=edge, facecolor=(colour, 0.1), edgecolor=(colour, seen))
        dash = DASHES[i // len(COLOURS) % len(DASHES)]
        (line,) = axes.plot(at, mean, dash, color=colour, linewidth=1.8, marker="o" if len(at) == 1 else "")
        what = (kinds or {}).get(label, "")
        line.set_label(f"{label}\n{what}" if what else label)
        lines.append((float(mean[-1]), line))
        if selected and label in selected:
            best = int(np.flatnonzero(at == selected[label])[0])
            axes.plot(at[best], mean[best], "o", color=colour, markersize=8, markeredgecolor="white", zorder=5)
    if target is not None:
        aim = float(scale_metric(target, metric))
        axes.axhline(aim, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
        axes.annotate("target", (0.01, aim), xycoords=("axes fraction", "data"), va="bottom", fontsize=SMALL, color=INK)
    axes.set_ylabel(with_unit(metric))
    by_round(axes)
    what = "mean over clients"
    if over == "clients":
        what += ", with the middle half of them"
    elif values.shape[1] > 1:
        what += f" and over {values.shape[1]} seeds, in a band from the least to the best of these"
    title(axes, what + ("; a dot on the selected round" if selected else ""))
    if len(lines) > 1:
        legend(axes, [line for _, line in sorted(lines, key=lambda ended: -ended[0])])  # as they end, top to bottom
    write(figure, path)


def accuracy_by_client(
    scores: Mapping[str, ArrayLike],
    names: Sequence[str],
    metric: str,
    path: Path,
    beside: Mapping[str, ArrayLike] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """A column per client and a dot per score, clients sorted by the first of the scores.

    Each of the scores is [N], `names` are the clients'; `beside` are those of other methods on the same clients, such
    as Local, drawn as dashes, and `kinds` says what a score is of, in words. A metric whose name ends in accuracy is
    shown in percent. Raises UsageError if the lengths differ.
    """
    values = {label: scale_metric(score, metric) for label, score in scores.items()}
    others = {label: scale_metric(score, metric) for label, score in (beside or {}).items()}
    for label, score in (values | others).items():
        if score.shape != (len(names),):
            raise UsageError(
                f"the scores of {label} must be [{len(names)}] for {len(names)} clients; got {list(score.shape)}"
            )
    first, names = next(iter(values)), number_illegible(names)
    order = np.argsort(values[first], kind="stable")
    table = np.stack(list(values.values()))[:, order]  # [labels, N]
    width = float(np.clip(len(names) * 0.22, 2.8, 9.5))
    figure, axes = page(width + 2.5, 4.2)
    x, step = np.arange(len(names)), 72 * width / len(names)  # points from client to client
    if len(values) > 1:
        axes.vlines(x, table.min(0), table.max(0), color=FAINT, linewidth=min(1.5, step / 5))
    dots = []
    for i, (label, row) in enumerate(zip(values, table, strict=True)):
        (dot,) = axes.plot(x, row, MARKS[i % len(MARKS)], color=COLOURS[i % len(COLOURS)], markeredgewidth=0)
        dot.set(markersize=float(np.clip(step / 2, 2.5, 6.5)), zorder=3 - i / len(values))  # the first on top
        what = (kinds or {}).get(label, "")
        text = f"{label}, mean {number(float(np.nanmean(row)), metric)}"
        dot.set_label(f"{text}\n{what}" if what else text)
        dots.append(dot)
    for label, score in others.items():
        (dash,) = axes.plot(x, score[order], "_", color=INK, zorder=3.5)
        dash.set(markersize=float(np.clip(0.6 * step, 3, 14)), markeredgewidth=1.6)
        dash.set_label(f"{label}, mean {number(float(np.nanmean(score)), metric)}")
        dots.append(dash)
    across = f"{len(names)} clients, sorted" + (f" by {first}" if len(values) > 1 else "")
    axes.set(xlim=(-0.8, len(names) - 0.2), xlabel=across, ylabel=with_unit(metric))
    if len(names) <= 60:
        name_ticks(axes, "x", x, [names[i] for i in order], width)
    else:
        axes.set_xticks([])
    legend(axes, dots)
    write(figure, path)


def classes_by_client(counts: ArrayLike, class_names: Sequence[str], client_names: Sequence[str], path: Path) -> None:
    """A column per client, a row per class, bubbles whose areas are numbers of examples.

    `counts: [N, C]`. Of very many clients some are shown, evenly chosen. Raises UsageError if the names do not fit.
    """
    counts_by_client = np.asarray(counts)
    clients, classes = len(client_names), len(class_names)
    if counts_by_client.shape != (clients, classes) or not counts_by_client.any():
        raise UsageError(
            f"the counts of {clients} clients and {classes} classes must be [{clients}, {classes}] and not all zero; "
            f"got {list(counts_by_client.shape)}"
        )
    client_names = number_illegible(client_names)
    class_names = number_illegible(class_names)
    shown, label = sample_clients(clients)
    clients = len(shown)
    client_names = [client_names[i] for i in shown]
    counts_by_client = counts_by_client[shown]
    across = float(np.clip(9 / clients, 0.045, 0.45))
    up = float(np.clip(7 / classes, 0.045, min(0.32, max(0.15, 2 * across))))
    width, height = clients * across, classes * up
    # Laid out in inches, so that bubbles fit their cells whatever room the names take; `_write` trims the page.
    figure = Figure(figsize=(width + 3, height + 2), dpi=150)
    axes = figure.add_axes((1.5 / (width + 3), 1 / (height + 2), width / (width + 3), height / (height + 2)))
    quiet(axes)
    axes.grid(axis="both", color=FAINT, linewidth=0.4)
    i, c = counts_by_client.nonzero()
    # A few large counts would shrink all others to dust: they fill their cells like the largest usual one.
    usual = float(np.quantile(counts_by_client[i, c], 0.98, method="higher"))
    cell = min(width / (clients + 0.4), height / (classes + 0.4))  # inches; the limits below leave 0.4 of one around
    area = (72 * 0.95 * cell) ** 2 / usual  # square points an example
    areas = np.clip(area * counts_by_client[i, c], 1.0, area * usual)
    axes.scatter(i, c, s=areas, color=COLOURS[0], linewidths=0, alpha=0.8, zorder=3)
    axes.set(xlim=(-0.7, clients - 0.3), ylim=(classes - 0.3, -0.7), xlabel=label, ylabel="class")
    name_ticks(axes, "x", np.arange(clients), client_names, width)
    name_ticks(axes, "y", np.arange(classes), class_names, height)
    sizes = _round_sizes(max(1, int(usual)))
    labels = [f"{size:,}" for size in sizes]
    if counts_by_client.max() > usual:
        sizes, labels = [*sizes, int(usual)], [*labels, f"over {int(usual):,}"]
    bubbles = [
        Line2D([], [], linestyle="", marker="o", color=COLOURS[0], markeredgewidth=0, alpha=0.8, label=label)
        for label in labels
    ]
    for bubble, size in zip(bubbles, sizes, strict=True):
        bubble.set_markersize(math.sqrt(area * size))
    widest = math.sqrt(area * sizes[-1])
    legend(axes, bubbles, title="examples", labelspacing=max(0.5, 0.7 * widest / SMALL), handlelength=widest / SMALL)
    write(figure, path)


def targets_by_client(targets: Sequence[ArrayLike], client_names: Sequence[str], path: Path) -> None:
    """A column per client, sorted by median: a dot there, a thick line over the middle half, a thin one over 90 %.

    `targets` are each client's, [n_i]; those that are NaN do not count. Of very many clients some are shown, evenly
    chosen. Raises UsageError if a client has none.
    """
    shares = [5, 25, 50, 75, 95]
    arrays = [np.asarray(values, np.float64) for values in targets]
    targets_of = [values[~np.isnan(values)] for values in arrays]
    if lacking := [name for name, values in zip(client_names, targets_of, strict=True) if not len(values)]:
        raise UsageError(f"every client needs targets; '{lacking[0]}' has none")
    levels = np.stack([np.percentile(values, shares) for values in targets_of])  # [N, 5]
    names = number_illegible(client_names)
    shown, label = sample_clients(len(names))
    order = np.argsort(levels[:, 2], kind="stable")[shown]
    low, begin, middle, end, high = levels[order].T
    width = float(np.clip(len(order) * 0.22, 2.8, 9.5))
    figure, axes = page(width + 1.5, 3.6)
    x, step = np.arange(len(order)), 72 * width / len(order)  # points from client to client
    axes.vlines(x, low, high, color=COLOURS[0], linewidth=min(1.2, step / 5))
    axes.vlines(x, begin, end, color=COLOURS[0], linewidth=min(5.0, step / 2), alpha=0.5)
    axes.plot(x, middle, "o", color=COLOURS[0], markersize=float(np.clip(step / 2, 2.0, 6.0)), markeredgewidth=0)
    axes.set_xlim(-0.8, len(order) - 0.2)
    name_ticks(axes, "x", x, [names[i] for i in order], width)
    axes.set_xlabel(f"{label}, sorted by median")
    axes.set_ylabel("target: median, middle half, 5 to 95 %")
    write(figure, path)


def _round_sizes(largest: int) -> list[int]:
    """Up to three round numbers for a legend, ascending, none above the largest."""
    sizes = [m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5) if m * 10**e <= largest]
    return sizes[::-2][:3][::-1]
