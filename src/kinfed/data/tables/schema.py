"""What training rows say of a table's columns, and new rows as inputs and targets by it."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UsageError
from .cells import Formats, with_tuples
from .column_statistics import DateStatistics, NumberStatistics, Statistics, WordStatistics, merge_statistics
from .columns import KINDS, NEVER, ROUNDING, Calendar, Category, Column, Number, Unused, part_scales
from .frame import Frame
from .moments import read_seconds
from .words import Codes, Numbers, name_of

ENOUGH, TIMES, APART = 10, 10.0, 2.0  # see `in_own_units`
NO_VALUE = "no training row has a value"
Scale = Literal["federation", "client", "auto"]


class Raw(NamedTuple):
    """A column as it is in a table."""

    values: Numbers  # [n] numbers, dates in seconds, or places in `texts`; NaN where there is no value
    texts: Sequence[str] = ()


class Own(NamedTuple):
    """The scale of a client's column that is in units of its own."""

    mean: float
    deviation: float
    median: float

    @classmethod
    def from_values(cls, count: int, mean: float, deviation: float, median: float, shared: "Own | Number") -> "Own":
        """As `count` values of a client say; what they do not say, as of no value or a constant, is as in `shared`."""
        if not count:
            return cls(shared.mean, shared.deviation, shared.median)
        return cls(mean, shared.deviation if deviation <= ROUNDING * abs(mean) else deviation, median)


class ByClient(NamedTuple):
    """Statistics of each client's numbers."""

    counts: Tensor  # [N, F] training rows with a value
    means: Tensor  # [N, F]
    deviations: Tensor  # [N, F]; 0 for a constant
    medians: Callable[[int], Numbers]  # [N] of one column


@dataclass(frozen=True)
class Target:
    """A column to predict: names of classes, or a number's mean and deviation."""

    name: str
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0
    bounds: tuple[float, ...] = ()  # the least and the largest answer, if there are such


@dataclass(frozen=True)
class Description:
    """The columns of a table as inputs and targets, by what training rows say of them. Plain numbers and text."""

    client: str  # the column that names the client a row belongs to
    inputs: tuple[Column, ...]
    targets: tuple[Target, ...] = ()
    clients: Mapping[str, Mapping[str, Own]] = field(default_factory=dict)  # scales of their own, by column
    formats: Formats = field(default_factory=Formats)  # by which text is read
    dropped: tuple[str, ...] = ()  # columns of the table that are none of these
    within: Mapping[str, Sequence[float]] = field(default_factory=dict)  # the least and the largest number, by column

    @property
    def names(self) -> list[str]:
        """[d] the names of a model's inputs."""
        return [part for column in self.inputs for part in column.parts]

    @property
    def sources(self) -> list[str]:
        """[d] the column of which each of them is."""
        return [column.name for column in self.inputs for _ in column.parts]

    def warn_of_constants(self, table: str) -> None:
        """Warn of numbers and dates that are the same in all training rows, of which nothing can be learnt."""
        scaled = [
            column for column in self.inputs if isinstance(column, Number | Calendar) and column.deviation == NEVER
        ]
        same = [
            f"{'the year of ' if isinstance(column, Calendar) else ''}'{column.name}' ({column.mean:.6g})"
            for column in scaled
        ]
        if same:
            what = f"{', '.join(same)} {'is' if len(same) == 1 else 'are'} the same in all training rows, so left out"
            warnings.warn(f"{table}: {what} of the inputs: other values change no answer", stacklevel=4)

    def with_newcomers(self, newcomers: Mapping[str, Mapping[str, Own]]) -> "Description":
        """The same with scales of clients that it does not know, of columns in which each client has its own."""
        shared_names = set.intersection(*({*scales} for scales in self.clients.values())) if self.clients else set()
        new = {
            who: {name: scales[name] for name in shared_names}
            for who, scales in newcomers.items()
            if who not in self.clients
        }
        return replace(self, clients={**self.clients, **new})

    def rename(self, names: Mapping[str, str], client: str) -> "Description":
        """The same of a table of one client, whose columns have other names."""
        scales = {names.get(name, name): scale for name, scale in self.clients.get(client, {}).items()}
        return Description(
            client=self.client,
            inputs=tuple(replace(column, name=names.get(column.name, column.name)) for column in self.inputs),
            targets=tuple(replace(target, name=names.get(target.name, target.name)) for target in self.targets),
            clients={client: scales} if scales else {},
            formats=self.formats.rename(names),
            dropped=tuple(names.get(name, name) for name in self.dropped),
            within={names.get(name, name): limits for name, limits in self.within.items()},
        )

    def scale(self) -> dict[str, Any]:
        """Mean and deviation of each of a model's inputs, and of targets; `clients` has those of clients' own."""
        scales = [scale for column in self.inputs for scale in part_scales(column)]
        scale: dict[str, Any] = {
            "inputs": {name: {"mean": m, "deviation": d} for name, (m, d) in zip(self.names, scales, strict=True)}
        }
        if self.clients:
            scale["clients"] = {
                client: {name: _moments_of(column) for name, column in columns.items()}
                for client, columns in self.clients.items()
            }
        if self.within:
            scale["within"] = dict(self.within)
        if numbers := [target for target in self.targets if not target.classes]:
            scale["targets"] = {target.name: _moments_of(target) for target in numbers}
        return scale

    def features(self, raw: Mapping[str, Raw], owners: Sequence[str], who: Codes, kind: torch.dtype) -> Tensor:
        """[n, d] inputs of rows that belong to owners[who]; those of other names have the scale of all."""
        result, at = torch.zeros(len(who), len(self.names), dtype=kind), 0
        names_scaled = {name for scales in self.clients.values() for name in scales}
        for column in (column for column in self.inputs if not isinstance(column, Unused)):
            values, texts = raw[column.name]
            if column.name in self.within:
                low, high = self.within[column.name]
                values = values.clip(low, high)
            part = result[:, at : at + len(column.parts)]
            at += len(column.parts)
            if isinstance(column, Category):
                ones = torch.from_numpy(column.ones(values, texts))
                rows = (ones >= 0).nonzero().flatten()
                part[rows, ones[rows]] = 1
            elif isinstance(column, Number) and column.name in names_scaled:
                shared = Own(column.mean, column.deviation, column.median)
                scales = np.array([self.clients.get(owner, {}).get(column.name, shared) for owner in owners])  # [N, 3]
                part[:] = torch.from_numpy(column.scale_by(values, *(scales[who, i] for i in range(3))))
            else:
                part[:] = torch.from_numpy(column.features(values))
        return result

    def apply(self, frame: Frame, client: str | None = None) -> tuple[Tensor, Tensor | None]:
        """x: [n, d] float32 of a table's rows, as a model is trained on them, and y; None if a target is no column.

        `client` is whose rows these are; left out, the column of clients says so, if there is one. y: [n] int64 are the
        places of classes; [n, k] numbers in their own units. Raises UsageError that names the line and column of what
        cannot be used.
        """
        x = self.encode(frame, client)
        return x, self._answers(frame) if all(target.name in frame.columns for target in self.targets) else None

    def encode(self, frame: Frame, client: str | None = None) -> Tensor:
        """x alone, see `apply`."""
        raw = self.cells(frame)
        owners, who = [client or ""], np.zeros(len(frame), np.int64)
        if client is None and self.client in frame.columns:
            owners, who = frame[self.client].words()
        return self.features(raw, owners, who, torch.float32)

    def cells(self, frame: Frame) -> dict[str, Raw]:
        """The cells of the columns that are used, read as in training; raises UsageError likewise."""
        used = [column for column in self.inputs if not isinstance(column, Unused)]
        frame.need([column.name for column in used])
        frame = frame.read_as(self.formats)
        raw = {column.name: raw_of(frame, column.name, column.kind) for column in used}
        self.warn_of_new(frame, raw)
        return raw

    def warn_of_new(self, frame: Frame, raw: Mapping[str, Raw]) -> None:
        """Warn of categories that no training row had, where these are no input."""
        for column in self.inputs:
            if isinstance(column, Category) and not column.other:
                values, texts = raw[column.name]
                new = [i for i, word in enumerate(texts) if word not in column.categories]
                rows = np.flatnonzero(np.isin(values, new))
                if len(rows):
                    word = texts[int(values[rows[0]])]
                    count = f"{len(rows):,} of {len(values):,} rows"
                    warnings.warn(
                        f"{frame[column.name].place(rows[0])}: '{word}' is in no training row, as in {count}; the "
                        "model treats it as none of the known categories",
                        stacklevel=4,
                    )

    def _answers(self, frame: Frame) -> Tensor:
        """y of a table's rows; raises UsageError where one is missing or of no known class."""
        if self.targets[0].classes:
            name = self.targets[0].name
            classes = [name_of(label) for label in self.targets[0].classes]
            texts = frame[name].text()
            places = texts.find_places(classes)
            if (places < 0).any():
                at = int((places < 0).argmax())
                raise UsageError(
                    f"{frame[name].place(at)}: '{texts.names[texts.codes[at]]}' is none of the "
                    f"{len(classes)} classes that were trained on"
                )
            return torch.from_numpy(places)
        frame = frame.read_as(self.formats)
        columns = [frame[target.name].filled_numbers() for target in self.targets]
        return torch.from_numpy(np.stack(columns, 1)).float()

    def to_dict(self) -> dict[str, Any]:
        inputs = [{"kind": column.kind, **asdict(column)} for column in self.inputs]
        clients = {
            client: {name: scale._asdict() for name, scale in scales.items()} for client, scales in self.clients.items()
        }
        return {
            "client": self.client,
            "inputs": inputs,
            "targets": [asdict(target) for target in self.targets],
            "clients": clients,
            "formats": asdict(self.formats),
            "dropped": list(self.dropped),
            "within": {name: list(limits) for name, limits in self.within.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Description":
        """The description that `to_dict` made."""
        inputs = [(value["kind"], {key: value[key] for key in value if key != "kind"}) for value in values["inputs"]]
        return cls(
            client=values["client"],
            inputs=tuple(KINDS[kind](**with_tuples(value)) for kind, value in inputs),
            targets=tuple(Target(**with_tuples(value)) for value in values["targets"]),
            clients={
                who: {name: Own(**scale) for name, scale in scales.items()} for who, scales in values["clients"].items()
            },
            formats=Formats(**with_tuples(values["formats"])),
            dropped=tuple(values["dropped"]),
            within=values.get("within", {}),
        )

    @classmethod
    def from_summary(cls, values: Mapping[str, Any] | None, run: str) -> "Description | None":
        """That of a finished run, whose summary has these values; None without, UsageError if they are not whole."""
        try:
            return None if values is None else cls.from_dict(values)
        except (LookupError, TypeError, AttributeError):
            raise incomplete(run) from None


def incomplete(run: str) -> UsageError:
    """The error for a run whose summary says only in part how its columns are read."""
    return UsageError(
        f"{run or 'the run'}: its summary.json does not say in full what its columns are; copy the whole folder again, "
        "or run again"
    )


def _moments_of(scaled: Own | Target) -> dict[str, float]:
    """For JSON."""
    return {"mean": scaled.mean, "deviation": scaled.deviation}


def raw_of(frame: Frame, name: str, kind: str) -> Raw:
    """A column of a table as one of a kind; raises UsageError that names the cell that is none."""
    if kind == "number":
        return Raw(frame[name].numbers())
    if kind == "date":
        return Raw(read_seconds(frame[name]))
    texts = frame[name].words()
    names = [name for name in texts.names if name]
    return Raw(np.where(texts.empty, math.nan, texts.find_places(names)), names)


def describe(
    client: str,
    statistics: Mapping[str, Statistics],
    owners: Sequence[str],
    by_client: ByClient,
    scale: Scale,
    most: int,
) -> Description:
    """The description by statistics of all training rows, by column, and of each client's numbers.

    `most` is how many categories of a column are told apart. See `TableReader` for `scale`. Raises UsageError for two
    columns that make inputs of one name.
    """
    inputs = [_describe_column(name, of_column, most) for name, of_column in statistics.items()]
    _check_names(inputs)
    numbers = [name for name, of_column in statistics.items() if isinstance(of_column, NumberStatistics)]
    scaled_by_client = _find_own(numbers, statistics, by_client, scale)
    clients: dict[str, dict[str, Own]] = {}
    kept = {column.name: column for column in inputs if isinstance(column, Number)}
    for i, name in enumerate(numbers):
        if scaled_by_client[i] and name in kept:
            moments = by_client.counts[:, i], by_client.means[:, i], by_client.deviations[:, i], by_client.medians(i)
            for owner, count, mean, deviation, median in zip(
                owners, *(values.tolist() for values in moments), strict=True
            ):
                clients.setdefault(owner, {})[name] = Own.from_values(count, mean, deviation, median, kept[name])
    return Description(client, tuple(inputs), (), clients)


def _describe_column(name: str, statistics: Statistics, most: int) -> Column:
    """Which inputs a column becomes."""
    if isinstance(statistics, WordStatistics):
        category = Category.from_statistics(name, statistics, most)
        return category if category.categories else Unused(name, _why(statistics))
    if isinstance(statistics, DateStatistics):
        return Calendar.from_statistics(name, statistics) if statistics.years.present else Unused(name, NO_VALUE)
    return Number.from_statistics(name, statistics) if statistics.present else Unused(name, NO_VALUE)


def _check_names(inputs: Sequence[Column]) -> None:
    """Raise UsageError if two columns make inputs of one name."""
    of: dict[str, str] = {}
    for column in inputs:
        for part in column.parts:
            if part in of:
                raise UsageError(
                    f"columns '{of[part]}' and '{column.name}' both make an input named '{part}'; rename one of them, "
                    "or leave it out with ignore"
                )
            of[part] = column.name


def describe_clients(
    client: str, parts: Mapping[str, Mapping[str, Statistics]], scale: Scale = "federation", most: int = 50
) -> Description:
    """The description by what clients say of their training rows, by their names and then by column."""
    owners, first = list(parts), next(iter(parts.values()))
    pooled = {name: merge_statistics([part[name] for part in parts.values()]) for name in first}
    numbers = [name for name, of_column in pooled.items() if isinstance(of_column, NumberStatistics)]
    by_row: list[list[Any]] = [[part[name] for name in numbers] for part in parts.values()]
    shape = (len(owners), len(numbers))
    means = torch.tensor([[entry.mean for entry in row] for row in by_row], dtype=torch.float64).view(shape)
    deviations = torch.tensor([[entry.deviation for entry in row] for row in by_row], dtype=torch.float64).view(shape)
    by_client = ByClient(
        torch.tensor([[entry.present for entry in row] for row in by_row]).view(shape),
        means,
        constant_to_zero(means, deviations),
        lambda i: np.array([row[i].median for row in by_row]),
    )
    return describe(client, pooled, owners, by_client, scale, most)


def constant_to_zero(means: Tensor, deviations: Tensor) -> Tensor:
    """Deviations without those that are only rounding."""
    return torch.where(deviations > ROUNDING * means.abs(), deviations, 0.0)


def _why(statistics: WordStatistics) -> str:
    """Why nothing of a column of text is an input."""
    if not statistics.counts:
        return "no client names its categories" if statistics.others else NO_VALUE
    return f"none of its {len(statistics.counts):,} categories is in enough training rows"


def _find_own(
    numbers: Sequence[str], statistics: Mapping[str, Any], by_client: ByClient, scale: Scale
) -> NDArray[np.bool_]:
    """[F] which columns are scaled client by client."""
    if scale != "auto":
        return np.full(len(numbers), scale == "client")
    flags = np.array([len(statistics[name].distinct) <= 2 for name in numbers], bool)
    varying: NDArray[np.bool_] = in_own_units(by_client.counts, by_client.means, by_client.deviations).numpy()
    return np.asarray(varying & ~flags, bool)


def in_own_units(counts: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """[F] which columns seem to be in units of each client's own, from counts, means and deviations: [N, F].

    Among clients with ten rows or more at which the column is not constant, the largest deviation is more than ten
    times the smallest, or the means are spread more than twice as far as the median deviation.
    """
    varies = (counts >= ENOUGH) & (deviations > 0)
    logs = deviations.clamp(min=torch.finfo(deviations.dtype).tiny).log()
    ratio = torch.where(varies, logs, -torch.inf).amax(0) - torch.where(varies, logs, torch.inf).amin(0)
    many = varies.sum(0)
    middle = torch.where(varies, means, 0).sum(0) / many
    spread = (torch.where(varies, means - middle, 0).square().sum(0) / many).sqrt()
    typical = torch.where(varies, deviations, torch.nan).nanmedian(0).values
    return (many > 1) & ((ratio > math.log(TIMES)) | (spread > APART * typical))
