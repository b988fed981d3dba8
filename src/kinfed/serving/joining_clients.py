"""Newcomers: clients with examples of their own, which took no part in a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ..core.seeding import generator, tags
from ..core.tasks import Task
from ..data.federation import Federation
from ..data.graph_files import read as read_graph
from ..data.split import SPLITS
from ..data.tables.column_statistics import NumberStatistics
from ..data.tables.columns import Number
from ..data.tables.encoder import Preparation
from ..data.tables.frame import Frame
from ..data.tables.open_table import open_table
from ..data.tables.row_examples import keep_weighted
from ..data.tables.schema import Description, Own
from ..data.tables.table_reader import TableReader
from ..data.tables.words import Numbers, known_name
from ..errors import UsageError, nearest
from ..runs.config import experiment as config
from ..runs.run import Run

FEWEST = 5  # examples from which some are for validation


@dataclass(frozen=True)
class Newcomer:
    """A client that took no part: its examples, those to learn from in a random order, and its links to members."""

    name: str
    x: Tensor  # [n, ...] the pool
    y: Tensor  # [n, ...]
    rows: Tensor  # [k] of the pool, to learn from, in random order
    test: Tensor  # [t] of the pool
    task: Task
    links: tuple[Tensor, Tensor] | None = None  # [N] to each client of the run, and [N] from it; None: no graph
    scales: Mapping[str, Own] = field(default_factory=dict)  # its scale of columns in units of each client's own
    weights: Tensor | None = None  # [n] as how many rows each example counts; None: all as one

    def federation(self, count: int, share: float, classes: Sequence[str] = ()) -> Federation:
        """It alone with its first `count` examples, of which this share is for validation if there are five or more."""
        aside = round(share * count) if count >= FEWEST else 0
        parts = {"train": self.rows[aside:count], "validation": self.rows[:aside], "test": self.test}
        rows = {split: [places] for split, places in parts.items()}
        return Federation(self.x, self.y, rows, self.task, (self.name,), classes=classes, weights=self.weights)


def of_table(saved: Run, path: Path, edges: Path | None) -> list[Newcomer]:
    """The newcomers in a file: one for each name in its column of clients, or without that column a single one.

    Everything is done to its rows, or readings of series, that was done to those of training. Raises UsageError for
    rows that do not fit.
    """
    made = saved.experiment
    if saved.summary.sites is None and made and isinstance(made.dataset, TableReader) and made.dataset.past:
        return _of_series(saved, made, made.dataset, path, edges)
    experiment, description = _read_experiment(saved)
    frame = open_table(path).with_joined(description.client)
    targets = [target.name for target in description.targets]
    if lacking := [name for name in targets if name not in frame.columns]:
        raise UsageError(
            f"{path} has no column '{lacking[0]}', by which models are tuned and scored; kinfed predict needs none"
        )
    frame = frame.with_all([*targets, *(name for name in [description.client] if name in frame.columns)])
    weight = str(getattr(experiment.dataset, "weight", ""))
    frame = _keep_weighted(frame, weight, description) if weight else frame
    weights = torch.from_numpy(frame[weight].weights()).float() if weight else None
    x, y = description.apply(frame)
    assert y is not None  # as all targets are there
    owners, who = [path.stem], torch.zeros(len(x), dtype=torch.int64)
    if description.client in frame.columns:
        column = frame[description.client].text()
        owners, who = list(column.names), torch.from_numpy(column.codes)
    _check_new(saved, owners)
    owned = [(who == i).nonzero().flatten() for i in range(len(owners))]
    labels = y if description.targets[0].classes else None
    draws = [generator(saved.summary.seeds[0], "split", int(tag)) for tag in tags(owners)]
    parts = experiment.split(owned, draws, labels)
    if short := [f"{name} ({len(rows)})" for name, rows, part in zip(owners, owned, parts, strict=True) if not part]:
        raise UsageError(f"{path}: too few rows to learn from and to be tested on: {', '.join(short[:8])}")
    learn = [torch.cat([part["train"], part["validation"]]) for part in parts]
    scales: dict[str, dict[str, Own]] = {}
    if description.clients:
        cells = {name: raw.values for name, raw in description.cells(frame).items()}
        scales = {name: scale_of(description, cells, rows) for name, rows in zip(owners, learn, strict=True)}
        x = replace(description, clients=scales).encode(
            frame, None if description.client in frame.columns else owners[0]
        )
    result = []
    for name, rows, part, links in zip(owners, learn, parts, _links(saved, owners, edges), strict=True):
        order = _shuffle(rows, saved, name)
        result.append(Newcomer(name, x, y, order, part["test"], saved.task, links, scales.get(name, {}), weights))
    return result


def _of_series(
    saved: Run, experiment: config.Experiment, reader: TableReader, path: Path, edges: Path | None
) -> list[Newcomer]:
    """The newcomers in a file of readings, which become windows, scaled as those of training."""
    frame = open_table(path).with_joined(reader.client_column)
    if reader.client_column not in frame.columns:
        frame = frame.with_text(reader.client_column, path.stem)
    dataset = replace(reader, edges="").read_frame(frame)
    _check_new(saved, dataset.owners)
    alone = replace(experiment, clients=0, newcomers=0, graph=lambda federation, seed: None)
    federation, _ = alone.everyone(None, saved.summary.seeds[0], dataset, saved.summary)
    links = _links(saved, list(federation.names), edges)
    return [_of_client(saved, federation, i, links[i]) for i in range(len(federation))]


def _of_client(
    saved: Run, federation: Federation, i: int, links: tuple[Tensor, Tensor] | None, scales: Mapping[str, Own] = {}
) -> Newcomer:
    """A client of a federation as a newcomer to a run, by its place."""
    train, validation, test = (federation.rows[split][i] for split in SPLITS)
    name = federation.names[i]
    rows = _shuffle(torch.cat([train, validation]), saved, name)
    return Newcomer(name, federation.x, federation.y, rows, test, federation.task, links, scales, federation.weights)


def _check_new(saved: Run, names: Sequence[str]) -> None:
    """Raise UsageError for a client that took part in the run."""
    if participants := [name for name in names if name in saved.names]:
        raise UsageError(f"client '{participants[0]}' took part in {saved.folder}; a newcomer needs a name of its own")


def _read_experiment(saved: Run) -> tuple[config.Experiment, Description]:
    """The experiment of a run, and the description of its columns; raises UsageError if it had no rows of a table."""
    description, experiment = saved.description, saved.experiment
    if description is None and saved.summary.sites is not None:
        raise UsageError(
            f"{saved.folder} was not trained on tables whose rows are examples, so no newcomer's file can be read as "
            "its sites' were"
        )
    if experiment is None or description is None:
        raise UsageError(
            f"a newcomer's file has examples as rows, and {saved.folder} was not trained on a table; "
            "leave clients out of training with federation.newcomers, and onboard them without --data"
        )
    return experiment, description


def _keep_weighted(frame: Frame, weight: str, description: Description) -> Frame:
    """The rows of newcomers that count by the column of weights; raises UsageError without that column."""
    if weight not in frame.columns:
        raise UsageError(
            f"{frame.name} has no column '{weight}', by which rows were weighed in training; add it, with 1 in each "
            "row if all count alike"
        )
    return keep_weighted(frame, weight, description.client if description.client in frame.columns else "")


def scale_of(description: Description, cells: Mapping[str, Numbers], rows: Tensor) -> dict[str, Own]:
    """A newcomer's scale of each column that is in units of each client's own, by the inputs that it learns from.

    `cells` are columns [n], of which it learns from `rows`. Targets are not needed, so it is the same for any number of
    examples.
    """
    columns = {column.name: column for column in description.inputs if isinstance(column, Number)}
    scales = {}
    for name in next(iter(description.clients.values()), {}):
        statistics = NumberStatistics.from_values(cells[name][rows.numpy()])
        scales[name] = Own.from_values(
            statistics.present, statistics.mean, statistics.deviation, statistics.median, columns[name]
        )
    return scales


def _links(saved: Run, owners: list[str], edges: Path | None) -> list[tuple[Tensor, Tensor] | None]:
    """What a file of links says of each newcomer and the clients of the run."""
    if edges is None:
        return [None] * len(owners)
    count, links = len(saved.names), list[tuple[Tensor, Tensor] | None]()
    for owner in owners:
        weights = read_graph(edges, [*saved.names, owner], strangers=True).weights
        if not weights[count].any() and not weights[:, count].any():
            raise UsageError(f"{edges} has no link between '{owner}' and a client of {saved.folder}")
        links.append((weights[count, :count], weights[:count, count]))
    return links


def of_run(saved: Run, data_dir: Path | None, wanted: Sequence[str] = ()) -> list[Newcomer]:
    """The clients of the run's own data that were left out of it; all of them, or those that are `wanted`."""
    experiment = saved.experiment
    if saved.summary.sites is not None:
        raise UsageError(f"the rows of {saved.folder} stayed at its sites: name the newcomer's own with --data FILE")
    if experiment is None or not experiment.newcomers:
        raise UsageError(
            f"no client of its data was left out of {saved.folder}: name newcomers' rows with --data FILE, or train "
            "with federation.newcomers=4"
        )
    seed, dataset = saved.summary.seeds[0], experiment.dataset(data_dir)
    federation, new = experiment.everyone(data_dir, seed, dataset)
    scales: dict[str, dict[str, Own]] = {}
    if (columns := federation.columns) is not None and columns.clients:
        assert isinstance(dataset.prepare, Preparation)
        cells = dict(zip(dataset.prepare.kinds, dataset.x.T.numpy(), strict=True))
        learn = {i: torch.cat([federation.rows[split][i] for split in ("train", "validation")]) for i in new}
        scales = {federation.names[i]: scale_of(columns, cells, rows) for i, rows in learn.items()}
        scaled_columns = replace(columns, clients={**columns.clients, **scales})
        summary = saved.summary
        data = replace(saved.summary.data, columns=scaled_columns.to_dict())
        federation, _ = experiment.everyone(data_dir, seed, dataset, replace(summary, data=data))
    names = [federation.names[i] for i in new]
    wanted = [known_name(name, names) for name in wanted]
    if unknown := [name for name in wanted if name not in names]:
        raise UsageError(f"'{unknown[0]}' is no newcomer to {saved.folder}; {nearest(unknown[0], names)}")
    members = torch.tensor([i for i in range(len(federation)) if i not in new])
    result = []
    for i, name in zip(new, names, strict=True):
        if wanted and name not in wanted:
            continue
        weights = None if federation.graph is None else federation.graph.weights
        links = None if weights is None else (weights[i, members], weights[members, i])
        result.append(_of_client(saved, federation, i, links, scales.get(name, {})))
    return result


def _shuffle(rows: Tensor, saved: Run, name: str) -> Tensor:
    """Rows in an order that is the same for every number of shots."""
    draw = generator(saved.summary.seeds[0], "newcomer", int(tags([name])[0]))
    return rows[torch.randperm(len(rows), generator=draw)]


def share_for_validation(experiment: config.Experiment) -> float:
    """The share for validation of a member's examples that are not for the test."""
    return experiment.split.validation / (1 - experiment.split.test)
