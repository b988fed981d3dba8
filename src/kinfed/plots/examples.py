"""A picture of what a data set holds: some images of each class, some series over time, points, or its targets."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..core.tasks import Classification, Forecasting
from ..data.dataset import Dataset
from .drawing import COLOURS, INK, MARKS, NORMAL, SMALL, legend, page, quiet, title, write
from .lettering import number_illegible

MOST = 10  # classes in rows, examples of each in columns
SERIES = 5
STEPS = 1008  # of a series: half a week of readings every 5 minutes


def examples(dataset: Dataset, name: str, path: Path) -> None:
    """Draw what its kind of data needs and write it to `path`."""
    if isinstance(dataset.task, Forecasting) and dataset.past + dataset.span > 1:
        _series(dataset, name, path)
    elif dataset.x.ndim == 4 and dataset.x.shape[1] in (1, 3) and isinstance(dataset.task, Classification):
        _images(dataset, name, path)
    elif dataset.x.ndim == 2 and dataset.x.shape[1] == 2 and isinstance(dataset.task, Classification):
        _points(dataset, name, path)
    else:
        _targets(dataset, name, path)


def _names(dataset: Dataset) -> list[str]:
    assert isinstance(dataset.task, Classification)
    return number_illegible(dataset.classes) or [str(c) for c in range(dataset.task.classes)]


def _images(dataset: Dataset, name: str, path: Path) -> None:
    names = _names(dataset)
    shown = [c for c in range(len(names)) if bool((dataset.y == c).any())][:MOST]
    figure = Figure(figsize=(7.5, 0.66 * len(shown) + 0.5), dpi=150, layout="constrained")
    few = "each class" if len(shown) == len(names) else f"{len(shown)} of {len(names)} classes"
    figure.suptitle(f"{name}: the first images of {few}", x=0.01, ha="left", fontsize=NORMAL, color=INK)
    grid = figure.subplots(len(shown), MOST, squeeze=False)
    for row, label in zip(grid, shown, strict=True):
        at = (dataset.y == label).nonzero().flatten()[:MOST].tolist()
        row[0].set_ylabel(names[label], rotation=0, ha="right", va="center", fontsize=SMALL, color=INK)
        for axes in row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, i in zip(row, at, strict=False):
            image = dataset.x[i].permute(1, 2, 0).numpy()
            low, high = image.min(), image.max()
            axes.imshow((image - low) / max(high - low, 1e-9), cmap="gray_r" if image.shape[2] == 1 else None)
    write(figure, path)


def _series(dataset: Dataset, name: str, path: Path) -> None:
    count = len(dataset.owners)
    readings = dataset.y.as_strided((dataset.y.untyped_storage().nbytes() // dataset.y.element_size(),), (1,), 0)
    readings = readings.view(count, -1)  # [N, T]
    assert dataset.time is not None
    step = dataset.time[: readings.shape[1]] - dataset.past
    step = torch.cat([step, step[-1] + 1 + torch.arange(readings.shape[1] - len(step))])
    at = np.linspace(0, count - 1, min(SERIES, count)).round().astype(int)
    owners = number_illegible(dataset.owners)
    figure = Figure(figsize=(8.5, 0.95 * len(at) + 0.7), dpi=150, layout="constrained")
    rows = figure.subplots(len(at), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, i in zip(rows, at, strict=True):
        quiet(axes)
        values = readings[i, :STEPS].double().clone()
        values[1:][step[: len(values)].diff() != 1] = torch.nan  # a line does not bridge a gap
        axes.plot(step[:STEPS].numpy(), values.numpy(), color=COLOURS[0], linewidth=0.8)
        axes.set_ylabel(owners[i], rotation=0, ha="right", va="center", fontsize=SMALL)
        axes.margins(x=0.01)
    rows[-1].set_xlabel("step")
    few = f"{len(at)} of {count} series" if len(at) < count else f"all {count} series"
    title(rows[0], f"{name}: the first {min(STEPS, readings.shape[1]):,} steps of {few}; a break is a missing reading")
    write(figure, path)


def _points(dataset: Dataset, name: str, path: Path) -> None:
    names = _names(dataset)
    figure, axes = page(5.6, 4.4)
    handles = []
    for c, label in enumerate(names[: len(COLOURS)]):
        at = dataset.x[dataset.y == c]
        axes.plot(at[:, 0], at[:, 1], MARKS[c], color=COLOURS[c], markersize=2, markeredgewidth=0, alpha=0.6)
        handles.append(Line2D([], [], linestyle="", marker=MARKS[c], color=COLOURS[c], markersize=4, label=label))
    axes.set_aspect("equal")
    title(axes, f"{name}: all {len(dataset.x):,} points")
    legend(axes, handles, title="class")
    write(figure, path)


def _targets(dataset: Dataset, name: str, path: Path) -> None:
    figure, axes = page(6.5, 3.4)
    if isinstance(dataset.task, Classification):
        names = _names(dataset)
        counts = torch.bincount(dataset.y, minlength=len(names))
        axes.bar(names, counts.tolist(), color=COLOURS[0])
        axes.set_xlabel("class")
    else:
        values = dataset.y.reshape(len(dataset.y), -1)[:, 0].double()
        axes.hist(values.numpy(), bins=40, color=COLOURS[0])
        axes.set_xlabel("target")
    axes.set_ylabel("examples")
    title(axes, f"{name}: the targets of {len(dataset.y):,} examples")
    write(figure, path)
