"""Protocol: a published table or figure as files: methods are rows, data are columns, each cell is an experiment.

`papers/METHOD/paper.toml` holds what all tables of a paper share, `papers/METHOD/TABLE.toml` one table, and
`papers/METHOD/printed.csv` the numbers that are printed. `papers/controls.toml` holds rows that every table has.
"""

import csv
import math
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kinfed.data.datasets.files import IMAGES
from kinfed.data.datasets.your_files import YOURS
from kinfed.errors import UsageError, nearest
from kinfed.methods import METHODS

from .scoring import Scoring, scoring

Table = dict[str, Any]

PAPERS = Path(__file__).parent
CONTROL, UNPRINTED = "control", "unprinted"  # kinds of rows that are not printed
REFERENCE = "reference"  # a printed row that is not federated
GROUPED = ("label_groups", "topologies")  # partitions with hidden groups
BY_CLASS = ("pathological", "shards")  # partitions whose clients share classes with some of the others
UNLINKED = ("digits", *YOURS, *IMAGES)  # data sets without a graph of their own
LEAST_ROUNDS = 5  # a scaled run has at least this many rounds, and evaluations


class Number(NamedTuple):
    """A printed result; `std` is None where no spread is printed."""

    mean: float
    std: float | None
    note: str


@dataclass(frozen=True)
class Row:
    """A method of a table."""

    name: str
    printed: str  # its name in the paper
    scoring: Scoring = Scoring()  # which model of which round is a client's score
    note: str = ""
    missing: str = ""  # why there is nothing to run
    kind: str = ""  # of one that is not a printed method's: CONTROL, UNPRINTED or REFERENCE
    graph: str = ""  # of a control on a graph: "known", or "shuffled" for that with its clients interchanged
    changes: Table = field(default_factory=dict)  # of the experiment

    @property
    def score(self) -> str:
        """The first kind of model that is scored; "": the one that validation prefers."""
        return next(iter(self.scoring.models), "")

    @property
    def command_name(self) -> str:
        """Its name on the command line: for a method from a file, the file's path and the method's name."""
        method = self.changes.get("method")
        return method if isinstance(method, str) and method.endswith(f":{self.name}") else self.name


@dataclass(frozen=True)
class Column:
    """A data set and a setting of a table."""

    name: str
    dataset: str  # as printed
    setting: str  # as printed
    mean_of: Sequence[str] = ()  # columns that this one is the mean of; it has no runs
    novel: bool = False  # only clients that join after the last round are scored
    subset: bool = False  # of the data that the paper used
    generated: bool = False  # data made in the manner of the paper's
    stand_in: bool = False  # other data in place of the paper's, or the paper's in another unit or split
    at: Mapping[str, str] = field(default_factory=dict)  # of weights: which layers, at which stage
    note: str = ""
    missing: str = ""  # why there is nothing to run
    lacks: Mapping[str, str] = field(default_factory=dict)  # rows that have nothing to run here, and why
    changes: Table = field(default_factory=dict)  # of the experiment


@dataclass(frozen=True)
class Protocol:
    """A published table: its rows, its columns, and what is printed."""

    name: str
    title: str
    source: str
    seeds: int  # runs of each cell
    spread: str  # what a printed spread is over: seeds or clients
    rows: Mapping[str, Row]
    columns: Mapping[str, Column]
    notes: Sequence[str]
    experiment: Table  # shared by all cells
    numbers: Mapping[tuple[str, str, str, str], Number]  # by data set, setting, method and metric, as printed
    others: Mapping[str, Row] = field(default_factory=dict)  # rows of the paper that this table does not print
    compares: Mapping[str, str] = field(default_factory=dict)  # rows that the paper compares before all others
    scoring: Scoring = Scoring()  # of rows that do not say otherwise

    def raw(self, row: Row, column: Column) -> Table:
        """The raw config of a cell, for `kinfed.runs.config.experiment.resolve`."""
        method = {"method": row.name} if row.name in METHODS else {}
        raw = merge_tables(method, self.experiment, column.changes, row.changes)
        if row.graph and (links := graphs(self.experiment, column)):
            raw["federation"]["graph"] = links[row.graph]
        return raw

    def extra(self, name: str) -> Row:
        """A row for a method that is not printed in this table, with what the paper says of it elsewhere."""
        return self.others.get(name) or Row(name, name, kind=UNPRINTED, scoring=self.scoring)

    def metrics(self, column: Column) -> list[str]:
        """What is printed in a column, or else anywhere in the table, in the order of printing."""
        at = (column.dataset, column.setting)
        mine = [metric for *where, _, metric in self.numbers if tuple(where) == at]
        return list(dict.fromkeys(mine or [metric for *_, metric in self.numbers]))


def tables() -> dict[str, Path]:
    """The files of all published tables, by name, such as pfedgat.table1."""
    paths = sorted(path for path in PAPERS.glob("*/*.toml") if path.stem != "paper")
    return {f"{path.parent.name}.{path.stem}": path for path in paths}


@cache
def load(name: str) -> Protocol:
    """The published table of this name; raises UsageError if there is none."""
    paths = tables()
    if name not in paths:
        raise UsageError(f"there is no table '{name}'; {nearest(name, paths)}")
    path = paths[name]
    paper, table = (tomllib.loads(p.read_text()) for p in (path.with_name("paper.toml"), path))
    numbers = _numbers(path.with_name("printed.csv"), table["printed"])
    methods = dict.fromkeys(method for *_, method, _ in numbers)
    order = {method: place for place, method in enumerate(methods)}
    mine = table.get("rows", {})
    shared_scoring = scoring({"protocol": paper.get("protocol", {})}, Scoring())
    rows = [_row(key, values, shared_scoring) for key, values in merge_tables(paper["rows"], mine).items()]
    shown = [row for row in rows if row.printed in order or row.name in mine]
    others = {row.name: replace(row, kind=UNPRINTED) for row in rows if row not in shown}
    shared = merge_tables(paper["experiment"], table.get("experiment", {}))
    columns = {key: column for name, values in table["columns"].items() for key, column in _columns(name, values)}
    if table.get("controls", True):
        controls = _controls(paper, shared_scoring)
        printed = {row.name for row in shown}
        shown += [row for row in controls if row.name not in printed]
        columns = {key: _mark_lacking_graphs(column, controls, columns, shared) for key, column in columns.items()}
        nowhere = set.intersection(*(set(column.lacks) for column in columns.values()))
        shown = [row for row in shown if row.name not in nowhere]
    return Protocol(
        name,
        title=table["title"],
        source=f"{paper['source']}, {table['where']}",
        seeds=table.get("seeds", paper["seeds"]),
        spread=paper["spread"],
        rows={row.name: row for row in sorted(shown, key=lambda row: order.get(row.printed, len(order)))},
        columns=columns,
        notes=[*paper.get("notes", []), *table.get("notes", [])],
        experiment=shared,
        numbers=numbers,
        others=others,
        compares=paper.get("compares", {}),
        scoring=shared_scoring,
    )


def graphs(experiment: Table, column: Column) -> dict[str, Any]:
    """The graph that a control has on a column, and that with its clients interchanged; empty if there is none.

    The one that the table's methods are given, the data's own, or else an oracle: hidden groups, or shared classes.
    """
    federation = merge_tables(experiment, column.changes).get("federation", {})
    data, dealt = (_name(federation.get(key)) for key in ("dataset", "partition"))
    if "graph" in federation or data not in UNLINKED:
        of = _name(federation.get("graph", "given"))
        is_given = of in ("given", "oracle", "label_overlap")  # which the paper's own rows have
        return {"shuffled": {"name": "shuffled", "of": of}} if is_given else {}
    if dealt in GROUPED or dealt in BY_CLASS:
        of = "oracle" if dealt in GROUPED else "label_overlap"
        return {"known": of, "shuffled": {"name": "shuffled", "of": of}}
    return {}


def dataset_of(table: Protocol, column: Column) -> str:
    """The name of a column's data set."""
    return str(_name(merge_tables(table.experiment, column.changes)["federation"]["dataset"]))


def printed_as(name: str) -> str:
    """The printed name of a table: that under which `printed.csv` has its numbers."""
    return tomllib.loads(tables()[name].read_text())["printed"]


def elsewhere(paper: str) -> dict[str, str]:
    """How to get printed results that no table file rebuilds: a line of text by the table's printed name."""
    return tomllib.loads((PAPERS / paper / "paper.toml").read_text()).get("elsewhere", {})


def experiments() -> dict[str, tuple[str, str]]:
    """The experiments of `kinfed run papers/...`: by name, the table and its column; the method is the paper's own."""
    result = {}
    for name in tables():
        protocol = load(name)
        if name.split(".")[0] in protocol.rows:
            for column in protocol.columns.values():
                if not column.mean_of:
                    result[f"papers/{name.replace('.', '/')}/{column.name}"] = (name, column.name)
    return result


def experiment(name: str, column: str) -> Table:
    """The raw config of a column with the paper's own method."""
    protocol = load(name)
    return protocol.raw(protocol.rows[name.split(".")[0]], protocol.columns[column])


def named_experiment(source: str) -> Table:
    """The raw config of papers/PAPER/TABLE/COLUMN; raises UsageError if there is none."""
    names = experiments()
    if source not in names:
        raise UsageError(f"there is no '{source}'; {nearest(source, names)} (kinfed papers list experiments names all)")
    return experiment(*names[source])


def scale_config(raw: Table, scale: float) -> Table:
    """A raw config for small machines: fewer rounds, and a share of each client's examples.

    Rounds: ceil(scale x rounds), 5 at least or as many as there were; settings that count rounds (when CFL may split,
    when late clients join) shrink alike. Examples: see `kinfed.data.split.Split.share`. Evaluated as seldom as before,
    but 5 times at least where the round is selected. Clients, local epochs and all else stay.
    """
    rounds = min(raw["rounds"], max(LEAST_ROUNDS, math.ceil(scale * raw["rounds"])))
    changes: Table = {"rounds": rounds, "federation": {"split": {"share": scale}}}
    drawn = raw.get("participation")
    drawn = drawn if isinstance(drawn, dict) else {}
    every = raw.get("evaluate_every", 1)
    if "by_group" not in drawn:  # where it is, evaluations keep step with it
        changes["evaluate_every"] = rounds if every == raw["rounds"] else min(every, max(1, rounds // LEAST_ROUNDS))
    if "joins" in drawn:
        joins = drawn["joins"]
        changes["participation"] = {"joins": rounds if joins == raw["rounds"] else math.ceil(scale * joins)}
    begin = raw.get("methods", {}).get("cfl", {}).get("begin")
    if begin is not None:
        changes["methods"] = {"cfl": {"begin": math.ceil(scale * begin)}}
    return merge_tables(raw, changes)


def merge_tables(*tables: Table) -> Table:
    """Tables merged, later ones over earlier ones; a part with another name replaces the earlier one entirely."""
    result: Table = {}
    for table in tables:
        for key, value in table.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict) and "name" not in value:
                result[key] = merge_tables(result[key], value)
            else:
                result[key] = deepcopy(value)
    return result


def _numbers(path: Path, table: str) -> dict[tuple[str, str, str, str], Number]:
    with path.open(newline="") as file:
        return {
            (line["dataset"], line["setting"], line["method"], line["metric"]): Number(
                float(line["mean"]), float(line["std"]) if line["std"] else None, line["note"]
            )
            for line in csv.DictReader(file)
            if line["table"] == table and line["mean"]
        }


def _controls(paper: Table, shared: Scoring) -> list[Row]:
    """The rows that every table of a paper has, with what it says of them."""
    declared = tomllib.loads((Path(__file__).parent / "controls.toml").read_text())
    rows = {name: merge_tables(values, paper["rows"].get(name, {})) for name, values in declared.items()}
    return [
        _row(name, {**values, "kind": CONTROL}, shared)
        for name, values in merge_tables(rows, paper.get("controls", {})).items()
    ]


def _mark_lacking_graphs(
    column: Column, controls: Sequence[Row], columns: Mapping[str, Column], experiment: Table
) -> Column:
    """The column, which says of controls on a graph that it has none."""
    parts = [columns[name] for name in column.mean_of] or [column]
    graphs_of_parts = [graphs(experiment, part) for part in parts]
    everywhere = set.intersection(*map(set, graphs_of_parts))
    lacks = {row.name: "no such graph" for row in controls if row.graph and row.graph not in everywhere}
    return replace(column, lacks={**lacks, **column.lacks})


def _name(part: Any) -> Any:
    """The name of a part, which may be given as a table or as its name only."""
    return part.get("name") if isinstance(part, dict) else part


def _row(name: str, values: Table, shared: Scoring) -> Row:
    about = {key: values[key] for key in ("printed", "note", "missing", "kind", "graph") if key in values}
    changes = {key: value for key, value in values.items() if key not in {*about, "score", "protocol"}}
    if name not in METHODS and "method" not in changes and "missing" not in about:
        about["missing"] = "not in kinfed"
    return Row(name, **about, scoring=scoring(values, shared), changes=changes)


def _columns(name: str, values: Table) -> list[tuple[str, Column]]:
    """A column, and one for each subset of its data that stands in for it."""
    described = ("dataset", "setting", "mean_of", "novel", "generated", "stand_in", "at", "note", "missing", "lacks")
    about = {key: values[key] for key in described if key in values}
    changes = {key: value for key, value in values.items() if key not in {*about, "subsets"}}
    main = Column(name, **about, changes=changes)
    result = [(name, main)]
    for subset, more in values.get("subsets", {}).items():
        mine = "/".join([subset, *name.split("/")[1:]])
        held = changes.get("federation", {}).get("dataset")
        dealt: Table = {"federation": {"dataset": {**held, "name": subset} if isinstance(held, dict) else subset}}
        parts = ["/".join([subset, *part.split("/")[1:]]) for part in main.mean_of]
        changed = changes if parts else merge_tables(changes, dealt, more)
        result.append((mine, replace(main, name=mine, mean_of=parts, subset=True, changes=changed)))
    return result
