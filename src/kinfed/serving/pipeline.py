"""Whole: a client's model together with what is done to rows before it and to its outputs after it, as one module."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..data.tables.columns import WEEK, Calendar, Category, Number
from ..data.tables.frame import DAY
from ..data.tables.schema import Description, Own
from ..errors import UsageError
from ..runs.predictor import Predictor, scale_windows

Columns = dict[str, Tensor]
MOST = 1e6  # deviation of an example's inputs, as that of a column that is constant in training has no bound


class Whole(nn.Module):
    """From columns of a table, or from x: [n, ...], to a client's answers by name.

    Columns are named as in the table: numbers [n] float64, NaN where one is missing; dates [n] float64 in seconds since
    1970 (UTC), NaN likewise; text [n] int64 as the places that `place_categories` gives. Readings are windows x: [n,
    past, F] in their own unit, NaN where one is missing; other arrays are as in training. Answers are `class` [n] int64
    and `probabilities` [n, C], or `prediction` [n, k] in the targets' own units.
    """

    def __init__(self, model: nn.Module, predictor: Predictor, client: str) -> None:
        super().__init__()
        self.kind = next(model.parameters()).dtype
        self.model = model
        description, scales = predictor.description, predictor.scales(client)
        self.before: nn.Module = nn.Identity()
        if description is not None:
            self.before = Encode(description, client)
        elif scales:
            self.before = Readings(scales)
        self.answers = predictor.answers

    def forward(self, given: Columns | Tensor) -> Columns:
        outputs = self.model(self.before(given).to(self.kind))
        if self.answers.classes:
            return {"class": outputs.argmax(1), "probabilities": outputs.softmax(1)}
        return {"prediction": self.answers.in_units(outputs.flatten(1))}


class Encode(nn.Module):
    """Inputs [n, d] of a table's columns, as `Description.encode` makes them of a client's rows."""

    def __init__(self, description: Description, client: str) -> None:
        super().__init__()
        scales = description.clients.get(client, {})
        parts: dict[str, nn.Module] = {}
        for column in description.inputs:
            if isinstance(column, Number):
                shared = Own(column.mean, column.deviation, column.median)
                parts[column.name] = _Number(scales.get(column.name, shared), bool(column.missing))
            elif isinstance(column, Category) and column.parts:
                parts[column.name] = _Category(len(column.parts))
            elif isinstance(column, Calendar):
                parts[column.name] = _Calendar(column)
        self.names, self.parts = list(parts), nn.ModuleList(parts.values())

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """[n, d] float32."""
        made = [part(columns[name]) for name, part in zip(self.names, self.parts, strict=True)]
        return torch.cat(made, 1).float()


class _Number(nn.Module):
    """A number on its scale, and whether it is missing."""

    def __init__(self, scale: Own, flagged: bool) -> None:
        super().__init__()
        self.flagged = flagged
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        holes = values.isnan()
        mean, deviation, median = self.scale.unbind()  # type: ignore[operator]
        scaled = (torch.where(holes, median, values) - mean) / deviation
        return torch.stack([scaled, holes.double()][: 1 + self.flagged], 1)


class _Category(nn.Module):
    """1 where a category holds; a place of -1 is none of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, places: Tensor) -> Tensor:
        return (places[:, None] == torch.arange(self.count)).double()


class _Calendar(nn.Module):
    """A date as `Calendar.features` has it, by the arithmetic of the Gregorian calendar."""

    def __init__(self, column: Calendar) -> None:
        super().__init__()
        self.clock, self.flagged = column.clock, bool(column.missing)
        self.register_buffer("scale", torch.tensor([column.mean, column.deviation], dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        present = ~values.isnan()
        seconds = torch.where(present, values, 0.0)
        days = (seconds / DAY).floor()
        year = _year(days)
        season = 2 * math.pi * (days - _begin(year)) / 365.25
        hour = 2 * math.pi * (seconds - DAY * days) / DAY
        weekday = days + 3 - 7 * ((days + 3) / 7).floor()  # 1 January 1970 was a Thursday
        week = [(weekday == i).double() for i in range(len(WEEK))]
        mean, deviation = self.scale.unbind()  # type: ignore[operator]
        columns = [(year - mean) / deviation, season.sin(), season.cos(), *week]
        columns += [hour.sin(), hour.cos()] if self.clock else []
        parts = [torch.where(present, column, 0.0) for column in columns]
        return torch.stack(parts + [(~present).double()] * self.flagged, 1)


def _year(days: Tensor) -> Tensor:
    """[n] the year of days since 1 January 1970: eras of 400 years, which begin on 1 March."""
    shifted = days + 719468
    era = (shifted / 146097).floor()
    day = shifted - era * 146097
    year = ((day - (day / 1460).floor() + (day / 36524).floor() - (day / 146096).floor()) / 365).floor()
    of_year = day - (365 * year + (year / 4).floor() - (year / 100).floor())
    return era * 400 + year + (of_year >= 306)  # from January on


def _begin(year: Tensor) -> Tensor:
    """[n] the days from 1 January 1970 to that of a year."""
    before = year - 1
    leaps = (before / 4).floor() - (before / 100).floor() + (before / 400).floor()
    return 365 * (year - 1970) + leaps - 477


class Readings(nn.Module):
    """Windows on the scale of training, as `scale_windows` makes them."""

    def __init__(self, scales: Sequence[tuple[float, float]]) -> None:
        """`scales`: [C] mean and deviation of the first inputs of a step."""
        super().__init__()
        self.register_buffer("scale", torch.tensor(scales, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[n, past, F] of the same."""
        return scale_windows(x, self.scale)  # type: ignore[arg-type]


def place_categories(column: Category) -> tuple[dict[str, int], int]:
    """The place of each category, and of "" for a missing one; and that of any other text."""
    other = len(column.categories) if column.other else -1
    missing = len(column.categories) + bool(column.other) if column.missing else -1
    return {**{category: i for i, category in enumerate(column.categories)}, "": missing}, other


def onnx_outputs(predictor: Predictor) -> list[str]:
    """What an ONNX file calls its answers, the last being numbers: as `Whole`, unless a column has that name."""
    taken = {column.name for column in predictor.description.inputs} if predictor.description is not None else set()
    names = ["class", "probabilities"] if predictor.answers.classes else ["prediction"]
    for i in range(len(names)):
        while names[i] in taken:
            names[i] = f"predicted {names[i]}"
    return names


def example(predictor: Predictor, rows: int, seed: int = 0) -> Columns | Tensor:
    """Random columns of so many rows, with missing cells, or x: [rows, ...], such as a `Whole` takes."""
    draw = torch.Generator().manual_seed(seed)
    description = predictor.description
    if description is None:
        x = torch.randn(rows, *predictor.shape, generator=draw)
        if scales := predictor.scales(predictor.names[0]):
            mean, deviation = torch.tensor(scales).unbind(1)
            x[..., : len(scales)] = x[..., : len(scales)] * deviation.clamp(max=MOST) + mean
            x[:, :2, 0] = torch.nan
        return x
    columns: Columns = {}
    for column in description.inputs:
        holes = torch.rand(rows, generator=draw) < 0.1
        if isinstance(column, Number):
            values = torch.randn(rows, generator=draw).double() * column.deviation + column.mean
            columns[column.name] = values.masked_fill(holes, torch.nan)
        elif isinstance(column, Calendar):
            values = (torch.rand(rows, generator=draw).double() * 100 * 365 * DAY).round()
            columns[column.name] = values.masked_fill(holes, torch.nan)
        elif isinstance(column, Category) and column.parts:
            least = 0 if column.other and column.missing else -1  # else there is text that is no input
            columns[column.name] = torch.randint(least, len(column.parts), (rows,), generator=draw)
    if not columns:
        raise UsageError("the run's models have no input")
    return columns
