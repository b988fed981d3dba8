"""Training rows of a table on this machine: what they say of its columns, and all rows as a model's inputs by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...core.tasks import Classification, Counts, Regression, find_bounds
from ...errors import UsageError
from ..dataset import Dataset
from .cells import Formats
from .column_statistics import DateStatistics, NumberStatistics, Statistics, WordStatistics, cut, some_distinct, years
from .columns import Unused
from .frame import DAY
from .leaks import warn_of_copies, warn_of_leaks
from .schema import ByClient, Description, Raw, Scale, Target, constant_to_zero, describe
from .words import Numbers

PARTS = ("mean", "deviation")  # of a target that is a number


@dataclass(frozen=True)
class Preparation:
    """Makes inputs, and numbers as targets, of a table's columns when its training rows are known."""

    table: str  # its name, for errors
    client: str  # the column that names the client a row belongs to
    targets: Sequence[str]
    kinds: Mapping[str, str]  # of the columns of inputs
    texts: Mapping[str, Sequence[str]]  # their text
    scale: Scale
    categories: int  # of a column, the most that are told apart
    formats: Formats  # by which text is read
    dropped: tuple[str, ...]  # columns of the table that are not used

    def __call__(self, dataset: Dataset, rows: Tensor) -> Dataset:
        """The data set with inputs [n, d] and, if they are numbers, scaled targets; rows: [n] are all training rows.

        A data set that has a description already, as where a run goes on, keeps it.
        """
        y, task, plain = dataset.y, dataset.task, torch.get_default_dtype()
        try:
            if (kept := dataset.columns) is not None:
                dataset = self._as_known(dataset, kept)
                y, task, description = dataset.y, dataset.task, kept
                if kept.clients and dataset.client is not None:
                    description = kept.with_newcomers(replace(self, scale="client").describe(dataset, rows).clients)
            else:
                description = self.describe(dataset, rows)
                description.warn_of_constants(self.table)
                self._warn_of_leaks(dataset, rows)
            description = replace(description, formats=self.formats, dropped=self.dropped)
        except UsageError as problem:
            raise UsageError(f"{self.table}: {problem}") from None
        columns = zip(self.kinds, dataset.x.T.numpy(), strict=True)
        raw = {name: Raw(values, self.texts[name]) for name, values in columns}
        owner = dataset.client
        who = np.zeros(len(y), np.int64) if owner is None else owner.numpy()
        x = description.features(raw, dataset.owners if owner is not None else [""], who, plain)
        if not x.shape[1]:
            raise UsageError(f"{self.table}: no column is left for the inputs, as training rows say nothing of any")
        if not y.is_floating_point():  # labels
            description = replace(description, targets=(Target(self.targets[0], tuple(dataset.classes)),))
            return replace(dataset, x=x, columns=description, scale=description.scale())
        middle, spread = moments(y[rows])
        low, high = find_bounds(y[rows])
        if description.targets:  # as they were
            # In float64, as they are kept: rounded, the same rows would be taken for other data.
            former = [[getattr(target, part) for target in description.targets] for part in PARTS]
            middle, spread = torch.tensor(former, dtype=torch.float64)
            if all(target.bounds for target in description.targets):
                low, high = zip(*(target.bounds for target in description.targets), strict=True)
        if not (spread > 0).all():
            same = self.targets[int((spread > 0).int().argmin())]
            raise UsageError(f"{self.table}: '{same}' is the same in all training rows, so there is nothing to learn")
        scales = zip(self.targets, middle.tolist(), spread.tolist(), zip(low, high, strict=True), strict=True)
        targets = tuple(Target(name, (), mean, deviation, within) for name, mean, deviation, within in scales)
        description = replace(description, targets=targets)
        if isinstance(task, Regression):
            task = replace(task, mean=tuple(middle.tolist()), deviation=tuple(spread.tolist()), low=low, high=high)
        elif isinstance(task, Counts):
            task = replace(task, mean=float(middle), high=high[0])
        return replace(dataset, x=x, y=y.to(plain), task=task, columns=description, scale=description.scale())

    def _warn_of_leaks(self, dataset: Dataset, rows: Tensor) -> None:
        """Warn of columns that tell targets in training rows, and of other rows that are copies of these."""
        x, y = dataset.x.numpy(), dataset.y.reshape(len(dataset.y), -1).double().numpy()
        at = rows.numpy()
        columns = {name: Raw(values, self.texts[name]) for name, values in zip(self.kinds, x.T, strict=True)}
        who = np.zeros(len(y), np.int64) if dataset.client is None else dataset.client.numpy()
        warn_of_leaks(
            self.table,
            columns,
            dict(zip(self.targets, y.T, strict=True)),
            who,
            at,
            dataset.classes,
            is_grouped=dataset.blocks is not None or dataset.time is not None,
        )
        warn_of_copies(self.table, x, y, at)

    def _as_known(self, dataset: Dataset, kept: Description) -> Dataset:
        """The data set with the classes of a description; raises UsageError where its columns are not those."""
        kinds = {column.name: column.kind for column in kept.inputs if not isinstance(column, Unused)}
        for name, kind in kinds.items():
            if name not in self.kinds:
                raise UsageError(f"column '{name}', an input of the existing models, is missing or empty")
            if self.kinds[name] != kind:
                raise UsageError(f"column '{name}' is a {kind} in the existing models, and here a {self.kinds[name]}")
        if [target.name for target in kept.targets] != list(self.targets):
            raise UsageError(
                f"models predict {', '.join(target.name for target in kept.targets)}, not {', '.join(self.targets)}"
            )
        classes, task = kept.targets[0].classes, dataset.task
        if bool(classes) == dataset.y.is_floating_point():
            was, now = ("classes", "numbers") if classes else ("numbers", "classes")
            raise UsageError(f"'{self.targets[0]}' has {was} in the existing models, and here {now}")
        if not classes:
            return dataset
        if new := [name for name in dataset.classes if name not in classes]:
            raise UsageError(
                f"'{new[0]}' in column '{self.targets[0]}' is none of the {len(classes)} classes trained on"
            )
        places = torch.tensor([classes.index(name) for name in dataset.classes])
        if isinstance(task, Classification):  # another one is the user's own
            task = replace(task, classes=len(classes))
        return replace(dataset, y=places[dataset.y], classes=classes, task=task)

    def describe(self, dataset: Dataset, rows: Tensor) -> Description:
        """What the training rows say."""
        values_of_rows = dataset.x[rows]
        at = [i for i, kind in enumerate(self.kinds.values()) if kind == "number"]
        numbers = values_of_rows if len(at) == len(self.kinds) else values_of_rows[:, at]
        mean, deviation = moments(numbers)
        statistics: dict[str, Statistics] = {}
        for i, (name, kind) in enumerate(self.kinds.items()):
            values = values_of_rows[:, i].numpy()
            if kind == "number":
                j = at.index(i)
                statistics[name] = _of_numbers(values, float(mean[j]), float(deviation[j]))
            else:
                statistics[name] = of_column(Raw(values, self.texts[name]), kind)
        owners, owner, scale = dataset.owners, dataset.client, self.scale
        if owner is None:  # rows that were dealt to clients who are not their owners
            owners = ("",)
            owner = torch.zeros(len(dataset.x), dtype=torch.int64)
            scale = "federation"
        count, whose = len(owners), owner[rows]
        by_client = ByClient(*moments_by_owner(numbers, whose, count), lambda i: _medians(numbers[:, i], whose, count))
        return describe(self.client, statistics, owners, by_client, scale, self.categories)


def of_column(raw: Raw, kind: str, median: bool = True) -> Statistics:
    """The statistics of a client's rows of one column; `median`: whether numbers are counted by value."""
    values = raw.values
    if kind == "number":
        return NumberStatistics.from_values(values, median)
    present = values[~np.isnan(values)]
    if kind == "date":
        return DateStatistics(
            NumberStatistics.from_values(years(values), median=False), bool((present % DAY != 0).any())
        )
    counts = np.bincount(present.astype(np.int64), minlength=len(raw.texts)).tolist()
    counts_by_text = {word: count for word, count in zip(raw.texts, counts, strict=True) if count}
    return WordStatistics(counts_by_text, len(values) - len(present))


def _of_numbers(values: Numbers, mean: float, deviation: float) -> NumberStatistics:
    """The statistics of all rows of a column, whose moments are known."""
    present = values[~np.isnan(values)]
    near = {float(np.median(cut(present))): len(present)} if len(present) else {}  # the median of all is the same
    return NumberStatistics(len(present), len(values) - len(present), mean, deviation, some_distinct(present), near)


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """[F] mean and standard deviation of each column of values: [n, F], over those that are no NaN; 0 of none."""
    values = values.double()
    if not values.shape[1]:  # of which PyTorch warns
        return values.new_empty(0), values.new_empty(0)
    mean, deviation = values.mean(0), values.std(0, correction=0)
    for i in mean.isnan().nonzero().flatten().tolist():
        present = values[:, i][~values[:, i].isnan()]
        mean[i], deviation[i] = (present.mean(), present.std(correction=0)) if len(present) else (0.0, 0.0)
    return mean, deviation


def moments_by_owner(x: Tensor, owner: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, F] values of each owner, and their means and standard deviations, of x: [n, F]; 0 for a constant."""
    filled, whose = ~x.isnan(), owner[:, None].expand_as(x)
    total = torch.zeros(count, x.shape[1], dtype=x.dtype)
    low = total.scatter_reduce(0, whose, torch.where(filled, x, torch.inf), "amin", include_self=False)
    high = total.scatter_reduce(0, whose, torch.where(filled, x, -torch.inf), "amax", include_self=False)
    x = torch.where(filled, x, 0.0)
    counts = total.index_add(0, owner, filled.to(x.dtype))
    means = total.index_add(0, owner, x) / counts.clamp(min=1)
    means = torch.where(low == high, low, means)  # the rounding of sums over 100,000 rows would make a constant vary
    squares = total.index_add(0, owner, torch.where(filled, x - means[owner], 0.0).square()) / counts.clamp(min=1)
    return counts.long(), means, constant_to_zero(means, squares.sqrt())


def _medians(values: Tensor, owner: Tensor, count: int) -> Numbers:
    """[N] the median of each owner's values: [n], as statistics say it; 0 without a value."""
    filled = ~values.isnan()
    near, who = cut(values[filled].numpy()), owner[filled].numpy()
    near = near[np.lexsort((near, who))]
    counts = np.bincount(who, minlength=count)
    begin = counts.cumsum() - counts
    if not len(near):
        return np.zeros(count)
    last = len(near) - 1
    low, high = (near[np.minimum(begin + np.maximum(place, 0), last)] for place in ((counts - 1) // 2, counts // 2))
    return np.where(counts > 0, (low + high) / 2, 0.0)
