"""A site's table, every row an example: what it tells of its columns, and its examples by what all sites said."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kinfed.core.seeding import generator, tags
from kinfed.core.tasks import Classification, Counts, Regression, Task, find_bounds
from kinfed.data.federation import Federation
from kinfed.data.split import SPLITS, Rows, Split
from kinfed.data.tables import disclosure
from kinfed.data.tables.column_statistics import NumberStatistics, Statistics, WordStatistics
from kinfed.data.tables.encoder import of_column
from kinfed.data.tables.row_examples import NAMES_ROWS, RowExamples, class_names, read_blocks, read_rows
from kinfed.data.tables.schema import Raw
from kinfed.data.tables.words import Codes
from kinfed.errors import Fault, UsageError, several

from ..wire.messages import Fields
from .agreed_columns import read_classes, read_description, read_inputs
from .site_reading import OwnTable

USUAL = 4.0  # deviations of all sites from their mean, which an answer may be at any site


@dataclass(frozen=True)
class SiteTable(OwnTable):
    """A table whose rows are examples; its methods raise UsageError, with what is in the table, for what is wrong."""

    @cached_property
    def _times(self) -> Tensor | None:
        """[n] the rows' times as steps from 0, if they are split by these."""
        if not self.reading.time:
            return None
        return torch.from_numpy(self.frame.times(self.reading.time, self.owners, series=False).steps)

    def hello(self) -> Fields:
        """What the server must know to see which tables fit together."""
        frame, targets, kinds = self.frame, self.targets, self.kinds
        if not kinds:
            problem = f"{frame.name}: no column is left for the inputs beside '{', '.join(targets)}'"
            raise UsageError(problem, Fault.INPUTS)
        labels = class_names(frame, targets, None)
        task: Fields = {"name": "Regression"}
        if labels is None:
            for name in targets:
                frame[name].numbers()  # raises if it holds anything else
        elif labels:
            task = {"name": "Classification", "classes": len(labels)}
        else:
            raise UsageError(f"{frame.name}: '{targets[0]}' has no value in any row", Fault.TARGET)
        return {
            "shape": [len(kinds)],
            "outputs": len(labels or targets),
            "task": task,
            "columns": list(kinds),
            "table": {
                "targets": targets,
                "kinds": kinds,
                "labels": labels or [],
                "units": self.units([*targets, *kinds]),
                "in_order": self._times is not None,  # raises for what is no time
            },
        }

    def describe(self, agreed: Fields, split: Split, seed: int) -> Fields:
        """Statistics of the training rows, none of them of a single row."""
        examples, parts, *_ = self._examples(agreed, split, seed)
        train, kinds = examples.of_rows(parts["train"].numpy()), dict(agreed["inputs"])
        statistics = {name: of_column(raw, kinds[name]) for name, raw in train.raw.items()}
        most, count = self.reading.categories, len(train.y)
        sent = {name: disclose_column(self.kinds[name], name, column, most) for name, column in statistics.items()}
        if agreed["classes"] and len(only := train.y.unique()) == 1:
            rows, name = several(count, "training row"), agreed["classes"][int(only)]
            warnings.warn(f"all {rows} are of one class, '{name}', so a model learns nothing else here", stacklevel=2)
        fields: Fields = {"statistics": sent, "rows": count}
        if not agreed["classes"]:
            targets = [
                disclosure.coarse(NumberStatistics.from_values(values, median=False)) for values in train.y.T.numpy()
            ]
            fields["answers"] = [disclosure.to_json(target._replace(distinct=())) for target in targets]
        return fields

    def federate(self, fields: Fields, task: Task, split: Split, seed: int, cut: float = math.inf) -> Federation:
        """A federation of this client alone, its inputs as the description of all sites' training rows says.

        Numbers lie within `cut` deviations of this site's own training rows, whatever the server says of them.
        """
        agreed, description = fields["agreed"], read_description(fields)
        examples, parts, used, blocks = self._examples(agreed, split, seed)
        within = _limits_of(examples.raw, dict(agreed["inputs"]), parts["train"].numpy(), cut)
        description = replace(description, within=within)
        x = description.features(examples.raw, [self.name], np.zeros(len(examples.y), np.int64), torch.float32)
        y = examples.y if isinstance(task, Classification) else examples.y.float()
        task = _bound_answers(task, y[parts["train"]])
        rows = {name: [parts[name]] for name in SPLITS}
        weight = self.reading.weight
        return Federation(
            x,
            y,
            rows,
            task=task,
            names=(self.name,),
            classes=tuple(agreed["classes"] or ()),
            scale=description.scale(),
            in_order=self._times is not None and not split.shuffle,
            blocks=blocks,
            weights=torch.from_numpy(self.frame[weight].weights()[used]).float() if weight else None,
        )

    def describe_reading(self, fields: Fields, federation: Federation) -> Fields:
        """What new rows need: the description in the names of this file, how this is written, and where it is cut."""
        agreed, description, task = fields["agreed"], read_description(fields), federation.task
        targets = agreed["targets"]
        description = replace(description, within=federation.scale.get("within", {}))
        if isinstance(task, Regression) and task.low:
            within = zip(description.targets, task.low, task.high, strict=True)
            within_bounds = tuple(replace(target, bounds=(low, high)) for target, low, high in within)
            description = replace(description, targets=within_bounds)
        elif isinstance(task, Counts) and task.high:
            (target,) = description.targets
            description = replace(description, targets=(replace(target, bounds=(0.0, task.high)),))
        kinds = dict(agreed["inputs"]) | dict.fromkeys(() if agreed["classes"] else targets, "number")
        description = replace(description, **self.frame.keep_reading(kinds, targets))
        return {"columns": description.rename(self.reading.own_names, self.name).to_dict()}

    def _examples(self, agreed: Fields, split: Split, seed: int) -> tuple[RowExamples, Rows, Codes, Tensor | None]:
        """The examples in this table's order, how they are split, as among those of all sites, and which rows they are.

        And groups if declared, which stay at the site.
        """
        kinds, classes = read_inputs(agreed), read_classes(agreed)
        self.check_asked(kinds)
        self.check_targets(agreed["targets"], classes)
        examples = read_rows(self.frame, kinds, agreed["targets"], classes, agreed["counts"])
        used = np.flatnonzero(examples.usable)
        examples = examples.of_rows(used)
        blocks = read_blocks(self.frame, self.reading.group, used) if self.reading.group else None
        parts = self._parts(used, examples.y if classes else None, blocks, split, seed)
        if not parts:
            few = f"{self.frame.name} has too few rows for training, validation and test: {len(used)}"
            if blocks is not None:
                few = f"{few}, as rows of one group stay together (--group {self.reading.group})"
            raise UsageError(few, Fault.FEW)
        if self.limits:
            self.limits.check_draw(self.path, split, seed, {name: used[part.numpy()] for name, part in parts.items()})
        return examples, parts, used, blocks

    def _parts(self, used: Codes, labels: Tensor | None, blocks: Tensor | None, split: Split, seed: int) -> Rows:
        """The rows of each split among those used; nothing if they are too few."""
        rows = torch.arange(len(used))
        draw = generator(seed, "split", int(tags([self.name])))
        if self._times is None or split.shuffle:
            if blocks is not None and len(used):
                return split.by_block([rows], blocks, [draw], seed)[0]
            by_class = split.stratify is not False
            return split([rows], [draw], labels if by_class else None)[0] if len(used) else {}
        if split.stratify:
            warnings.warn(
                "rows are split in time order (--time), so classes do not have their share of each part, as "
                "federation.split.stratify asks",
                stacklevel=4,
            )
        return split.by_own_time(self._times[torch.from_numpy(used)], 1, rows, draw)


def _limits_of(
    raw: Mapping[str, Raw], kinds: Mapping[str, str], train: Codes, cut: float
) -> dict[str, tuple[float, float]]:
    """The least and the largest number of each column: `cut` deviations from the mean of those in the training rows."""
    result = dict[str, tuple[float, float]]()
    for name in (name for name, kind in kinds.items() if kind == "number" and math.isfinite(cut)):
        numbers = NumberStatistics.from_values(raw[name].values[train], median=False)
        if numbers.present and numbers.deviation > 0:
            far = cut * numbers.deviation
            result[name] = (numbers.mean - far, numbers.mean + far)
    return result


def _bound_answers(task: Task, y: Tensor) -> Task:
    """The task with answers within this site's targets, y: [n, k], or `USUAL` deviations from the mean of all sites."""
    if isinstance(task, Regression) and task.mean:
        low, high = (torch.tensor(bound) for bound in find_bounds(y))
        mean, deviation = torch.tensor(task.mean), torch.tensor(task.deviation)
        usual = mean - USUAL * deviation
        usual = torch.where(low < 0, usual, usual.clamp(min=0))
        low, high = low.minimum(usual), high.maximum(mean + USUAL * deviation)
        return replace(task, low=tuple(low.tolist()), high=tuple(high.tolist()))
    if isinstance(task, Counts):
        return replace(task, high=max(find_bounds(y)[1][0], USUAL * task.mean))
    return task


def disclose_column(kind: str, name: str, statistics: Statistics, most: int) -> Fields:
    """What leaves a site of a column: statistics of training rows, none of a single one, and `most` names at most.

    `own` is the kind that the column has at this site.
    """
    if isinstance(statistics, WordStatistics) and len(statistics.counts) > most > 0:
        warnings.warn(
            f"'{name}' has {len(statistics.counts):,} categories, of which the {most:,} most frequent are named to the "
            "server (categories)",
            stacklevel=3,
        )
    # A number that is a category elsewhere is told as one only where it is not that of a few rows.
    names = 0 if kind == NAMES_ROWS else most
    least = 1 if kind == "category" else disclosure.FEWEST
    return disclosure.to_json(disclosure.coarse(statistics, names, least))
