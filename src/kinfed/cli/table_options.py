"""A table of the user's own on the command line: a file, a folder or a database, --client and --target."""

import argparse
import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from ..data.dataset import Dataset
from ..data.datasets import DATASETS
from ..data.tables.open_table import kind_of, open_table
from ..data.tables.schema import Description
from ..data.tables.table_reader import TableReader
from ..errors import UsageError
from ..methods import METHODS
from ..report.tables.text_table import draw
from ..runs.config import experiment as config, from_table
from ..runs.config.experiment import Experiment, Table

OPTIONS = ("client", "target", "ignore", "time", "group", "weight", "query")
LISTS = ("features", "future", "static")  # settings that are columns, with commas between


def is_table(source: str) -> bool:
    """Whether a command is given a table, or a folder of tables."""
    return bool(kind_of(source))


def door(args: argparse.Namespace) -> dict[str, Any]:
    """What only a choice for a table does: models are candidates too, and the winner is trained on all rows."""
    yours = is_table(args.source)
    named = any(override.partition("=")[0].partition(".")[0] == "model" for override in args.overrides)
    return {"models": yours and not named, "refit": yours and args.refit}


def read(source: str, args: argparse.Namespace, method: str = "") -> Table:
    """The raw config of a table, or of what else a command takes; a table's has a method only if one is named."""
    if is_table(source):
        named = [f'method.name="{method}"'] if method else []
        args.refit, args.overrides = _refit(args.overrides)
        args.overrides = [_of_the_table(override) for override in args.overrides]
        args.frame = open_table(source, args.query)  # kept for `dataset`, as reading may take long
        options = [f"federation.dataset.time={json.dumps(args.time)}"] if args.time else []
        options += [f"federation.dataset.group={json.dumps(args.group)}"] if args.group else []
        options += [f"federation.dataset.weight={json.dumps(args.weight)}"] if args.weight else []
        options += [f"federation.dataset.ignore={_format_names(args.ignore)}"] if args.ignore else []
        overrides = [*options, *named, *args.overrides]
        return from_table.config(source, args.client, args.target, overrides, args.query, args.frame)
    check_no_file(source)
    given = [f"--{name}" for name in OPTIONS if getattr(args, name)]
    if method:
        given.append("--method")
    if given:
        chosen = f" --method {source}" if source in METHODS else ""
        raise UsageError(
            f"{given[0]} is for a table of yours, and '{source}' is not one: kinfed run FILE.csv --client COLUMN "
            f"--target COLUMN{chosen}"
        )
    return config.read(source, args.overrides)


def _of_the_table(override: str) -> str:
    """A setting of how the table is read, which needs no prefix, with its prefix; any other as it is."""
    key, equals, value = override.partition("=")
    if key not in {setting.name for setting in fields(TableReader)}:
        return override
    value = _format_names(value) if key in LISTS and not value.startswith("[") else value
    return f"federation.dataset.{key}{equals}{value}"


def _format_names(names: str) -> str:
    """Names with commas between, as TOML."""
    return json.dumps([name.strip() for name in names.split(",") if name.strip()], ensure_ascii=False)


def _refit(overrides: list[str]) -> tuple[bool, list[str]]:
    """Whether the winner is trained once more on all rows, and the other settings."""
    choices = [override.partition("=")[2] for override in overrides if override.partition("=")[0] == "refit"]
    if wrong := [choice for choice in choices if choice not in ("true", "false")]:
        raise UsageError(f"refit is true or false; got {wrong[0]!r:.80}")
    return "false" not in choices[-1:], [override for override in overrides if override.partition("=")[0] != "refit"]


def check_no_file(source: str) -> None:
    """Raise UsageError if a command that takes a name is given a file or a folder that is no table."""
    path = Path(source)
    if path.suffix and path.is_file() and path.suffix not in (".toml", ".py"):
        open_table(source)  # says which files are tables
    if path.is_dir() and source not in METHODS and source not in DATASETS and not (path / "config.toml").exists():
        raise UsageError(
            f"{source} is a folder without a .csv or .parquet in it; pictures and other sets are read by the data sets "
            f"image_folder, huggingface, leaf and leaf_text, such as federation.dataset.name=leaf "
            f"federation.dataset.path={source}"
        )


def dataset(experiment: Experiment, args: argparse.Namespace) -> Dataset:
    """The data set of an experiment on the table that `read` has read."""
    reader: Any = experiment.dataset
    frame, args.frame = args.frame, None
    return reader.read_frame(frame)


def command(args: argparse.Namespace, method: str = "") -> str:
    """The command that trains on the table."""
    given = {name: getattr(args, name) for name in OPTIONS} | {"method": method}
    options = [f"--{name} {shlex.quote(value)}" for name, value in given.items() if value]
    return " ".join(["kinfed run", shlex.quote(args.subject), *options, *map(shlex.quote, args.overrides)])


def columns_of(description: Description) -> Grid:
    """The columns of a table: what each is, and what it becomes."""
    rows = [(column.name, column.kind, str(column)) for column in description.inputs]
    return draw(("column", "kind", "by training rows"), rows, range(3), (0, 2))


def tell(choices: from_table.Choices, console: Console) -> None:
    """Print the choices, and what to warn of."""
    console.print(draw(("", ""), choices.sentences.items(), (0, 1), (1,)))
    for line in choices.warnings:
        console.print(f"! {line}", soft_wrap=True)
