"""Columns by what is public of them, so that no row has a say in how rows become inputs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UsageError
from ..dataset import Dataset
from .columns import Category, Unused
from .disclosure import read_public
from .encoder import Preparation
from .schema import Description, Target, describe_clients


def describe_publicly(dataset: Dataset, columns: Mapping[str, Any]) -> Dataset:
    """The data set of a table, whose description is by what is public of its `columns`, and by none of its rows.

    A number becomes an input, and a target is scaled, by the middle and a quarter of its range; a number is answered
    within it. Raises UsageError for a column of which nothing is public, and for data that are no table.
    """
    table = dataset.prepare
    if not isinstance(table, Preparation):
        raise UsageError("privacy.columns says what is public of a table's columns, and these are no rows of a table")
    if table.scale != "federation":
        raise UsageError(
            f"federation.dataset.scale='{table.scale}' takes clients' own rows, which have no price under privacy"
        )
    public = read_public(table.kinds, [] if dataset.classes else table.targets, columns)
    description = describe_clients(
        table.client, {"": {name: public[name] for name in table.kinds}}, most=table.categories
    )
    targets = [Target(table.targets[0], tuple(dataset.classes))]
    if not dataset.classes:
        numbers: list[Any] = [public[name] for name in table.targets]
        bounds = [tuple(map(float, columns[name])) for name in table.targets]
        targets = [
            Target(name, (), statistics.mean, statistics.deviation, within)
            for name, statistics, within in zip(table.targets, numbers, bounds, strict=True)
        ]
    return replace(dataset, columns=replace(description, targets=tuple(targets)))


def is_public(description: Description, columns: Mapping[str, Any]) -> bool:
    """Whether inputs are as `describe_publicly` makes them: scaled by public ranges, of categories that are public."""
    used = [column for column in description.inputs if not isinstance(column, Unused)]
    try:
        public = describe_clients("", {"": read_public({column.name: column.kind for column in used}, [], columns)})
    except UsageError:  # of some nothing is public, or what is public is of another kind
        return False
    return all(_is_as(column, wanted, columns) for column, wanted in zip(used, public.inputs, strict=True))


def _is_as(column: Any, wanted: Any, columns: Mapping[str, Any]) -> bool:
    if isinstance(column, Category):
        return {*column.categories} <= {*columns[column.name]}
    return (column.mean, column.deviation) == (wanted.mean, wanted.deviation)
