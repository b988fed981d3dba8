"""A site's table, every row an example: what it tells of its columns, and its examples by what all sites said."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.seeding import generator, tags
from ...core.tasks import Classification, Task
from ...data.federation import Federation
from ...data.split import SPLITS, Rows, Split
from ...data.tables import disclosure, doubts, table_reader
from ...data.tables.column_statistics import NumberStatistics, Statistics, WordStatistics
from ...data.tables.encoder import of_column
from ...data.tables.frame import FEW, Frame, natural
from ...data.tables.open_table import open_table
from ...data.tables.owners import Owners
from ...data.tables.schema import Description, Raw, raw_of
from ...data.tables.words import Codes
from ...errors import Fault, UsageError, several
from ..wire.messages import Words
from .drawn_rows import Disclosure
from .site_reading import Reading

EMPTY, NAMES_ROWS = "empty", "identifier"  # kinds of columns that are no input unless they are more elsewhere


class _Examples(NamedTuple):
    """The rows of a table that have a target."""

    raw: dict[str, Raw]  # their inputs
    y: Tensor  # [n] labels, or [n, 1] numbers
    parts: Rows


@dataclass(frozen=True)
class SiteTable:
    """The table of the site `name`; its methods raise UsageError, with what is in the table, for what is wrong."""

    path: Path
    name: str
    reading: Reading
    limits: Disclosure | None = None

    @cached_property
    def frame(self) -> Frame:
        """The table, its columns named as the sites agreed."""
        frame = open_table(self.path).renamed(self.reading.columns).read_as(self.reading.formats)
        frame.need([*self.reading.formats.text])
        frame.need(self._targets(frame))
        frame.need([*self.reading.ignore])
        frame.need([self.reading.time] * bool(self.reading.time))
        return frame

    @cached_property
    def _times(self) -> Tensor | None:
        """[n] the rows' times as steps from 0, if they are split by these."""
        if not self.reading.time:
            return None
        held = Owners([self.name], np.zeros(len(self.frame), np.int64), None)
        return torch.from_numpy(self.frame.moments(self.reading.time, held, series=False)[1])

    def _targets(self, frame: Frame) -> list[str]:
        """The columns to predict."""
        target = self.reading.target
        return [target] if target in frame.columns else [name.strip() for name in target.split(",")]

    def hello(self) -> Words:
        """What the server must know to see which tables fit together."""
        frame, targets = self.frame, self._targets(self.frame)
        target = targets[0]
        taken = {*targets, *self.reading.ignore, self.reading.time, *frame.added}
        kinds = {name: kind_of(frame, name) for name in frame.columns if name not in taken}
        if not kinds:
            told = f"{frame.name}: no column is left for the inputs beside '{', '.join(targets)}'"
            raise UsageError(told, Fault.INPUTS)
        if len(targets) > 1:
            found = None
            for name in targets:
                frame.numbers(name)  # raises if it holds anything else
        else:
            found = frame.labels(target)
        in_order = self._times is not None  # raises for what is no time
        labels = [] if found is None else sorted({*found.names} - {""}, key=natural)
        if found is None:
            task: Words = {"name": "Regression"}
        else:
            if not labels:
                raise UsageError(f"{frame.name}: '{target}' has no value in any row", Fault.TARGET)
            if len(labels) > max(FEW, len(frame) / 2):
                raise UsageError(
                    f"{frame.name}: '{target}' has {len(labels):,} different labels in {len(frame):,} rows, so it "
                    "names rows rather than classes; predict another column",
                    Fault.TARGET,
                )
            task = {"name": "Classification", "classes": len(labels)}
        return {
            "shape": [len(kinds)],
            "outputs": max(len(labels), len(targets)),
            "task": task,
            "columns": list(kinds),
            "table": {
                "targets": targets,
                "kinds": kinds,
                "labels": labels,
                "units": units_of(frame, [*targets, *kinds]),
                "in_order": in_order,
            },
        }

    def describe(self, agreed: Words, split: Split, seed: int) -> Words:
        """Statistics of the training rows, none of them of a single row."""
        found = self._examples(agreed, split, seed)
        train = found.parts["train"].numpy()
        said = {}
        for name, kind in agreed["inputs"]:
            known = of_column(Raw(found.raw[name].values[train], found.raw[name].words), kind)
            said[name] = told_of(self.frame, name, known, self.reading.categories)
        if agreed["classes"] and len(only := found.y[found.parts["train"]].unique()) == 1:
            rows, name = several(len(train), "training row"), agreed["classes"][int(only)]
            warnings.warn(f"all {rows} are of one class, '{name}', so a model learns nothing else here", stacklevel=2)
        words: Words = {"statistics": said, "rows": len(train)}
        if not agreed["classes"]:
            columns = found.y[found.parts["train"]].T.numpy()
            each = [disclosure.coarse(NumberStatistics.of(values, median=False)) for values in columns]
            words["answers"] = [disclosure.to_json(one._replace(distinct=())) for one in each]
        return words

    def federate(self, words: Words, task: Task, split: Split, seed: int) -> Federation:
        """A federation of this client alone, its inputs as the description of all sites' training rows says."""
        agreed, description = words["agreed"], description_of(words)
        found = self._examples(agreed, split, seed)
        x = description.features(found.raw, [self.name], np.zeros(len(found.y), np.int64), torch.float32)
        y = found.y if isinstance(task, Classification) else found.y.float()
        rows = {name: [found.parts[name]] for name in SPLITS}
        classes = tuple(agreed["classes"] or ())
        in_order = self._times is not None and not split.shuffle
        return Federation(x, y, rows, task, (self.name,), None, None, classes, "", description.scale(), in_order)

    def kept(self, words: Words) -> Words:
        """What new rows need: the description in the names of this file, and how this file is written."""
        agreed, description = words["agreed"], description_of(words)
        kinds = dict(agreed["inputs"]) | ({} if agreed["classes"] else dict.fromkeys(agreed["targets"], "number"))
        used = {*agreed["targets"], *kinds}
        description = replace(
            description,
            formats=self.frame.trained_formats(kinds),
            dropped=tuple(name for name in self.frame.columns if name not in used),
        )
        own = {ours: theirs for theirs, ours in self.reading.columns.items()}
        return {"columns": description.renamed(own, self.name).to_dict()}

    def _examples(self, agreed: Words, split: Split, seed: int) -> _Examples:
        """The examples in this table's order, and how they are split: as among those of all sites."""
        frame, target, classes = self.frame, agreed["targets"][0], agreed["classes"]
        asked = [*agreed["targets"], *(name for name, _ in agreed["inputs"])]
        frame.need(asked)
        if withheld := {*asked} & {*self.reading.ignore, self.reading.time}:
            told = f"{frame.name}: the server asks for column '{min(withheld)}', which stays here (--ignore, --time)"
            raise UsageError(told, Fault.WITHHELD)
        if classes:
            found = frame.labels(target) or frame.words(target)
            index = {name: i for i, name in enumerate(classes)}
            codes = np.array([index.get(name, -1) for name in found.names], np.int64)[found.codes]
            usable, y = codes >= 0, torch.from_numpy(codes)
        else:
            numbers = np.stack([frame.numbers(name) for name in agreed["targets"]], 1)
            usable, y = np.all(~np.isnan(numbers), axis=1), torch.tensor(numbers)
        if agreed["counts"]:
            table_reader.check_counts(frame, target, numbers[:, 0])
        if not usable.all():
            few, first = f"{int((~usable).sum()):,} of {len(usable):,}", frame.row(int(usable.argmin()))
            warnings.warn(
                f"{few} rows have no {' or no '.join(agreed['targets'])} and were left out (the first: {first})",
                stacklevel=2,
            )
        used = np.flatnonzero(usable)
        whole = {name: raw_of(frame, name, kind) for name, kind in agreed["inputs"]}
        known = np.where(usable[:, None], y.double().numpy().reshape(len(y), -1), np.nan)  # [n, k]
        doubts.warn(frame, whole, dict(zip(agreed["targets"], known.T, strict=True)), bool(classes))
        raw = {name: Raw(one.values[used], one.words) for name, one in whole.items()}
        y = y[torch.from_numpy(used)]
        parts = self._parts(used, y if classes else None, split, seed)
        if not parts:
            raise UsageError(f"{frame.name} has too few rows for training, validation and test: {len(used)}", Fault.FEW)
        if self.limits:
            self.limits.check_draw(self.path, split, seed, {name: used[part.numpy()] for name, part in parts.items()})
        return _Examples(raw, y, parts)

    def _parts(self, used: Codes, labels: Tensor | None, split: Split, seed: int) -> Rows:
        """The rows of each split among those used; nothing if they are too few."""
        rows, draw = torch.arange(len(used)), generator(seed, "split", int(tags([self.name])))
        if self._times is None or split.shuffle:
            by_class = split.stratify is not False
            return split([rows], [draw], labels if by_class else None)[0] if len(used) else {}
        if split.stratify:
            warnings.warn(
                "rows are split in time order (--time), so classes do not have their share of each part, as "
                "federation.split.stratify asks",
                stacklevel=4,
            )
        return split.by_own_time(self._times[torch.from_numpy(used)], 1, rows, draw)


def kind_of(frame: Frame, name: str) -> str:
    """The kind of a column of inputs; raises UsageError for one that can be none."""
    kind = frame.kind(name)
    if kind == EMPTY:
        return EMPTY
    frame.column(name)  # raises for a type that is no number, text or date
    if kind == "text" and len(frame) > table_reader.FEWEST:
        words = frame.words(name)
        if len({*words.names} - {""}) == int((~words.empty).sum()):
            return NAMES_ROWS
    return table_reader.KINDS[kind]


def units_of(frame: Frame, names: Sequence[str]) -> Words:
    """The unit in which each of these columns is written, a sign of money or %, of those that have one."""
    return {name: unit for name in names if frame.kind(name) == "numbers" and (unit := frame.unit(name))}


def told_of(frame: Frame, name: str, known: Statistics, most: int) -> Words:
    """What leaves a site of a column: statistics of training rows, none of a single one, and `most` names at most."""
    own = kind_of(frame, name)
    if isinstance(known, WordStatistics) and len(known.counts) > most > 0:
        warnings.warn(
            f"'{name}' has {len(known.counts):,} categories, of which the {most:,} most frequent are named to the "
            "server (--categories)",
            stacklevel=3,
        )
    # A number that is a category elsewhere is told as one only where it is not that of a few rows.
    names, least = 0 if own == NAMES_ROWS else most, 1 if own == "category" else disclosure.FEWEST
    return disclosure.to_json(disclosure.coarse(known, names, least))


def description_of(words: Mapping[str, Any]) -> Description:
    """The description in a message of the server's; raises UsageError if it is none."""
    try:
        return Description.from_dict(words["description"])
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UsageError("the server's description of the columns cannot be used; install the same version") from None
