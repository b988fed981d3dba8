"""Rows of a table as examples: the kinds of columns, classes, and cells by what one reader or all sites agreed on."""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import Fault, UsageError
from . import cell_warnings
from .column import FEW
from .frame import Frame, natural
from .labels import read_labels
from .schema import Raw, raw_of
from .words import Codes, Numbers

UNUSUAL = 10.0  # mean weights above this, or below its inverse, are doubted to count rows
FEWEST = 10  # rows from which a column of text that is different in each names rows
EMPTY, NAMES_ROWS = "empty", "identifier"  # kinds of columns that are no input
CALLED = {"number": "numbers", "category": "text", "date": "dates", NAMES_ROWS: "different in each row"}  # for people
KINDS = {"numbers": "number", "text": "category", "dates": "date"}  # of cells, as the kinds of columns


class RowExamples(NamedTuple):
    """The rows of a table, among them those that cannot be used."""

    raw: dict[str, Raw]  # inputs, by column
    y: Tensor  # [n] places of classes, or [n, k] numbers; anything in rows that are not usable
    usable: NDArray[np.bool_]  # [n] which rows have a target

    def of_rows(self, rows: Codes) -> "RowExamples":
        raw = {name: Raw(column.values[rows], column.texts) for name, column in self.raw.items()}
        return RowExamples(raw, self.y[torch.from_numpy(rows)], self.usable[rows])


def column_kind(frame: Frame, name: str) -> str:
    """The kind of a column of inputs, `EMPTY`, `NAMES_ROWS`, or the type of cells that can be no input."""
    kind = frame.kind(name)
    if kind == "text" and len(frame) > FEWEST:
        texts = frame[name].words()
        if len({*texts.names} - {""}) == int((~texts.empty).sum()):
            return NAMES_ROWS
    return KINDS.get(kind, kind)


def class_names(frame: Frame, targets: Sequence[str], labelled: bool | None) -> list[str] | None:
    """The names of the classes to predict, in order; None if the targets are numbers.

    `labelled` says whether the target is a label; None: if it holds text or few whole numbers. Raises UsageError for
    labels that name rows.
    """
    if labelled is False or len(targets) > 1:
        return None
    texts = frame[targets[0]].words() if labelled else read_labels(frame[targets[0]])
    if texts is None:
        return None
    names = sorted({*texts.names} - {""}, key=natural)
    if len(names) > max(FEW, len(frame) / 2):
        raise UsageError(
            f"{frame.name}: '{targets[0]}' has {len(names):,} different labels in {len(frame):,} rows, so it "
            "names rows rather than classes; predict another column",
            Fault.TARGET,
        )
    return names


def read_rows(
    frame: Frame,
    kinds: Mapping[str, str],
    targets: Sequence[str],
    classes: Sequence[str] | None,
    counts: bool = False,
    drop_missing: bool = False,
) -> RowExamples:
    """The rows as examples whose inputs are columns of these kinds; a warning counts those without a target.

    `counts`: the target is a whole number from 0; `drop_missing`: rows that lack any input are not usable either.
    Raises UsageError that names the cell that is not what it should be, or if no row is usable.
    """
    if classes is None:
        values = np.stack([frame[name].numbers() for name in targets], 1)  # [n, k]
        if counts:
            _check_counts(frame, targets[0], values[:, 0])
        y = torch.from_numpy(np.nan_to_num(values))
    else:
        places = frame[targets[0]].words().find_places(classes)
        values, y = np.where(places < 0, np.nan, places)[:, None], torch.from_numpy(places)
    raw = {name: raw_of(frame, name, kind) for name, kind in kinds.items()}
    cell_warnings.warn(frame, raw, dict(zip(targets, values.T, strict=True)), classes is not None)
    usable = np.asarray(~np.isnan(values).any(1), bool)
    if drop_missing:
        usable &= ~np.any([np.isnan(column.values) for column in raw.values()], axis=0)
    if not usable.all():
        what = "lack a value" if drop_missing else f"have no {' or no '.join(targets)}"
        if not usable.any():
            raise UsageError(f"{frame.name}: all {len(usable):,} rows {what}", Fault.TARGET)
        count = f"{int((~usable).sum()):,} of {len(usable):,}"
        first = frame.row(int(usable.argmin()))
        warnings.warn(f"{frame.name}: {count} rows {what} and were left out (the first: {first})", stacklevel=4)
    return RowExamples(raw, y, usable)


def keep_weighted(frame: Frame, name: str, client: str = "") -> Frame:
    """The frame without the rows whose weight is 0, which count as if they were not there; see `read_weights`."""
    kept = read_weights(frame, name, client) > 0
    return frame if kept.all() else frame.keep(kept)


def read_weights(frame: Frame, name: str, client: str = "") -> Numbers:
    """[n] as how many rows each row counts, by the column `name`.

    A warning tells of weights that are unlike counts of rows. Raises UsageError that names the cell that is no weight,
    or a client, by the column of clients, of which no row counts.
    """
    weights = frame[name].weights()
    kept = weights > 0
    fix = f"give a row of it a weight above 0 in '{name}', or leave its rows out of the table"
    if not kept.any():
        raise UsageError(f"{frame.name}: '{name}' is 0 in all rows, so that none counts; correct it", Fault.WEIGHT)
    if client:
        owners = frame[client].words()
        if len(lost := np.flatnonzero(~np.isin(owners.codes, owners.codes[kept]))):
            name_of = owners.names[owners.codes[lost[0]]]
            raise UsageError(f"{frame.row(lost[0])}: all rows of '{name_of}' have weight 0; {fix}", Fault.WEIGHT)
    mean = float(weights[kept].mean())
    if not 1 / UNUSUAL <= mean <= UNUSUAL:
        warnings.warn(
            f"{frame.name}: a row counts as {mean:.4g} rows on average, by '{name}', where models are solved; if these "
            "weights only compare rows, divide them by their mean",
            stacklevel=4,
        )
    return weights


def _check_counts(frame: Frame, name: str, values: Numbers) -> None:
    """Raise UsageError that names the first of a column's values: [n] that is no count; NaN is none at all."""
    wrong = ((values < 0) | (values != np.round(values))) & ~np.isnan(values)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"{frame[name].place(at)}: {values[at]:g} is not a count, a whole number from 0; correct it, or predict "
            "the column as a number: leave counts out",
            Fault.COUNT,
        )


def read_blocks(frame: Frame, column: str, used: Codes) -> Tensor:
    """[n] int64 the group of each row that is used, by a column such as persons; a row without one is by itself."""
    cells = frame[column].words()
    blocks = cells.find_places(cells.names)[used].astype(np.int64)
    lone = blocks < 0
    blocks[lone] = len(cells.names) + np.arange(int(lone.sum()))
    return torch.from_numpy(blocks)
