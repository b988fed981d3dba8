"""Covariates: columns beside the target of a series, whose cells are further inputs of its windows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UsageError, list_names, several
from ..steps import carried_forward
from .column_statistics import Statistics
from .columns import Column, Number, part_scales
from .encoder import of_column
from .frame import Frame
from .schema import Description, Raw, Scale, describe_clients, raw_of
from .words import Codes, Numbers


class Grid(NamedTuple):
    """Which cell of a table is a client's at a step."""

    rows: Codes  # [n] rows of the table
    who: Codes  # [n] whose they are
    place: Codes  # [n] at which of the steps
    shape: tuple[int, int]  # N, T

    def lay_out(self, values: Numbers) -> Numbers:
        """[N, T] values: [rows of the table], NaN where a client has no row."""
        result = np.full(self.shape, np.nan)
        result[self.who, self.place] = values[self.rows]
        return result


@dataclass(frozen=True)
class Covariates:
    """The cells of columns beside a target, of every client at every step, and when each is known.

    A window's inputs are the cells of its past steps, and of columns `ahead` also those of the steps that are to be
    forecast: `leads` says how many steps later than each past step they are read, so that windows stay views.
    """

    client: str  # the column that names the client
    owners: Sequence[str]  # [N]
    kinds: Mapping[str, str]  # number or category, by column
    cells: Mapping[str, Raw]  # by column, with values [N, T], NaN where there is none
    steps: Tensor  # [T] int64
    ahead: Sequence[str]  # columns that are known ahead
    scale: Scale = "federation"
    categories: int = 50  # of a column, the most that are told apart

    def statistics(self, seen: NDArray[np.bool_]) -> dict[str, dict[str, Statistics]]:
        """What the cells that are seen: [N, T] say, by client and column; of empty ones nothing."""
        by_owner: dict[str, dict[str, Statistics]] = {}
        for i, owner in enumerate(self.owners):
            by_owner[owner] = {}
            for name, (values, texts) in self.cells.items():
                seen_values = values[i][seen[i] & ~np.isnan(values[i])]
                by_owner[owner][name] = of_column(Raw(seen_values, texts), self.kinds[name], median=False)
        return by_owner

    def describe(self, seen: NDArray[np.bool_]) -> Description:
        """The columns as inputs, by the cells that are seen: [N, T]."""
        return describe_clients(self.client, self.statistics(seen), self.scale, self.categories)

    def complete(self, former: Description, seen: NDArray[np.bool_]) -> Description:
        """A description from before, with scales of their own for clients that it does not know, if others have such.

        Raises UsageError where columns are not those.
        """
        if missing := [column.name for column in former.inputs if column.name not in self.cells]:
            raise UsageError(f"column '{missing[0]}', an input of the existing models, is missing or empty")
        if not former.clients:
            return former
        return former.with_newcomers(replace(self, scale="client").describe(seen).clients)

    def channels(self, description: Description, leads: Sequence[int]) -> Tensor:
        """[N, T, C] the inputs of every step, as `names_of` calls them.

        An empty cell is the last one before it, since the last gap in time, or else 0: the mean, or no category.
        """
        count, length = len(self.owners), len(self.steps)
        cells = {
            name: Raw(carried_forward(torch.from_numpy(values), self.steps).flatten().numpy(), texts)
            for name, (values, texts) in self.cells.items()
        }
        who = np.repeat(np.arange(count), length)
        every = description.features(cells, self.owners, who, torch.get_default_dtype()).view(count, length, -1)
        later, at = [], 0
        for column in description.inputs:
            part = every[..., at : at + len(column.parts)]
            at += len(column.parts)
            empty = torch.from_numpy(np.isnan(cells[column.name].values)).view(count, length)
            part[empty] = 0.0
            for lead in leads if column.name in self.ahead else ():  # 0 at the end, where no window asks for it
                later.append(torch.nn.functional.pad(part[:, lead:], (0, 0, 0, min(lead, length))))
        return torch.cat([every, *later], -1)


def leads_of(past: int, horizon: int) -> list[int]:
    """How many steps later than the past ones future covariates are read, so that each step ahead is read once.

    >>> leads_of(12, 3), leads_of(2, 5)
    ([3], [2, 4, 5])
    """
    return sorted({min(past * (i + 1), horizon) for i in range(-(-horizon // past))})


def names_of(description: Description, ahead: Sequence[str], leads: Sequence[int]) -> list[str]:
    """[C] the names of `Covariates.channels`."""
    later = [
        f"{part}, {several(lead, 'step')} later"
        for column in description.inputs
        for lead in leads
        if column.name in ahead
        for part in column.parts
    ]
    return [*description.names, *later]


def scales_of(
    description: Description, ahead: Sequence[str], leads: Sequence[int], client: str
) -> list[tuple[float, float]]:
    """[C] mean and deviation by which each of `Covariates.channels` of a client is scaled."""
    scales = description.clients.get(client, {})

    def find_scales(column: Column) -> list[tuple[float, float]]:
        if isinstance(column, Number) and column.name in scales:
            return [(scales[column.name].mean, scales[column.name].deviation)]
        return part_scales(column)

    later = [column for column in description.inputs for _ in leads if column.name in ahead]
    return [scale for column in (*description.inputs, *later) for scale in find_scales(column)]


def cells_of(
    frame: Frame, kinds: Mapping[str, str], static: Sequence[str], grid: Grid, owners: Sequence[str]
) -> dict[str, Raw]:
    """The columns as `Covariates.cells`; raises UsageError for a static one that changes within a client."""
    cells = {}
    for name, kind in kinds.items():
        values, texts = raw_of(frame, name, kind)
        laid = grid.lay_out(values)
        if name in static:
            laid = np.broadcast_to(_constant(frame, name, values, grid, owners)[:, None], grid.shape).copy()
        cells[name] = Raw(laid, texts)
    return cells


def _constant(frame: Frame, name: str, values: Numbers, grid: Grid, owners: Sequence[str]) -> Numbers:
    """[N] each client's one value of a static column, NaN of one without any."""
    filled = ~np.isnan(values[grid.rows])
    rows, who = grid.rows[filled], grid.who[filled]
    holders, first = np.unique(who, return_index=True)
    of_client = np.zeros(len(owners), np.int64)
    of_client[holders] = rows[first]
    if (other := values[rows] != values[of_client[who]]).any():
        row, client = int(rows[other.argmax()]), int(who[other.argmax()])
        before = frame.row(of_client[client]).rpartition(", ")[2]
        raise UsageError(
            f"{frame[name].quote(row)}, but '{frame[name].cell(of_client[client])}' in "
            f"{before}, though '{name}' is static and both are of client '{owners[client]}'; correct the cell, or take "
            "the column out of static"
        )
    result = np.full(len(owners), np.nan)
    result[holders] = values[rows[first]]
    return result


def describe_faults(frame: Frame, covariates: Covariates, grid: Grid, readings: Numbers, past: int) -> Iterator[str]:
    """Columns that end before readings: [N, T], never begin, or count time, and categories of one client, in words."""
    row_of = np.full(grid.shape, -1)
    row_of[grid.who, grid.place] = grid.rows
    last, owners = _last(readings), covariates.owners
    for name, (values, texts) in covariates.cells.items():
        ends, needed = _last(values), 1 if name in covariates.ahead else past
        if len(stale := np.flatnonzero((ends >= 0) & (last - ends >= needed))):
            i = int(stale[0])
            more = f" (as at {several(len(stale) - 1, 'more client')})" if len(stale) > 1 else ""
            yield (
                f"{frame[name].place(row_of[i, ends[i]])}: this is the last value of client '{owners[i]}', "
                f"{several(int(last[i] - ends[i]), 'step')} before its last reading{more}, and stands for all later "
                "ones; fill them in, or leave the column out with ignore"
            )
        if (empty := np.flatnonzero(ends < 0).tolist()) and len(empty) < len(ends):
            who = list_names([owners[i] for i in empty])
            yield f"{frame.name}: '{name}' has no value in any row of {who}, and is taken to be as at most rows there"
        if not texts and _rises(values):
            yield (
                f"{frame[name].place(int(grid.rows[0]))}: '{name}' rises from row to row at every client, as counters "
                "do, so forecasts lie beyond all that was trained on; leave it out with ignore"
            )
        if texts and len(owners) > 1:
            yield from _lonely(frame, name, Raw(values, texts), row_of, owners)


def _rises(values: Numbers) -> bool:
    """Whether every client's known values: [N, T] rise from each to the next, of one client at least."""
    present = [row[~np.isnan(row)] for row in values]
    return any(len(row) > 1 for row in present) and all((np.diff(row) > 0).all() for row in present)


def _last(values: Numbers) -> Codes:
    """[N] the last step with a value: [N, T], -1 if there is none."""
    filled = ~np.isnan(values)
    return np.where(filled.any(1), values.shape[1] - 1 - filled[:, ::-1].argmax(1), -1)


def _lonely(frame: Frame, name: str, raw: Raw, row_of: Codes, owners: Sequence[str]) -> Iterator[str]:
    """The first category that one client alone has."""
    held = np.zeros((len(owners), len(raw.texts)), bool)
    who, at = np.nonzero(~np.isnan(raw.values))
    held[who, raw.values[who, at].astype(np.int64)] = True
    alone = np.flatnonzero(held.sum(0) == 1)
    if not len(alone):
        return
    code = int(alone[0])
    i = int(held[:, code].argmax())
    at = np.flatnonzero((raw.values[i] == code) & (row_of[i] >= 0))
    also = f", as {len(alone) - 1:,} more of its categories are of one client each" if len(alone) > 1 else ""
    yield (
        f"{frame[name].place(row_of[i, at[0]])}: only client '{owners[i]}' has '{raw.texts[code]}'{also}, so others "
        "neither learn from it nor teach it; write it as others do, or leave the column out with ignore"
    )
