"""Reproduction: the runs behind a published table, and the table with our numbers beside the printed ones."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinfed.core.engine import latecomers
from kinfed.core.seeding import tags
from kinfed.core.summary import Summary, spread
from kinfed.data.datasets.sources.originals import ORIGINALS
from kinfed.data.partitions.deal import hidden_groups
from kinfed.errors import UsageError, nearest, note_failure
from kinfed.methods import METHODS
from kinfed.models import MODELS
from kinfed.runs.config import experiment as config, parts, plugins
from kinfed.runs.config.experiment import Experiment
from kinfed.runs.launch import Job, check_same
from kinfed.runs.run_folder import Array, RunFolder, follow_pointer
from kinfed.verdict.graph_quality import group_weights, rand_by_round

from . import published_table, twins
from .published_table import CONTROL, UNPRINTED, Column, Number, Protocol, Row
from .scoring import BY_TEST, Scoring

WITHOUT_FILE = ("digits", "synthetic")
ORACLES = ("oracle", "label_overlap")  # graphs that a real server would not know
ON_GRAPHS = ("sfl", "panacea")  # methods that use a known graph
OTHER_PROTOCOL = "other protocol"
FLAGS = {
    OTHER_PROTOCOL: "trained or scored otherwise than the paper very probably did: no claim is judged by it",
    BY_TEST: "test examples chose the round: no claim is judged by it",
    CONTROL: "not printed; what any method should be beside",
    UNPRINTED: "not printed in this table",
    "own model": "another network than the paper's",
    "generated": "data made in the manner of the paper's, which is not published",
    "stand-in": "other data in place of the paper's, or the paper's in another unit or split",
    "subset": "not all of the data that the paper used",
    "leaking": "test examples influenced training, as in the paper",
    "oracle graph": "the graph is made from labels, which a server would not know",
    "tf32": "local training multiplied in TF32",
    "bf16": "local training multiplied in bfloat16",
}


class Measure(NamedTuple):
    """How a printed metric is read from a run: a score of clients, which statistic of it, and in which unit.

    The score is one of the test scores in history.csv; `weight`, of the relation; `success`, of a backdoor; or `rand`,
    the Rand index of clusters against hidden groups. `better` is 1 if it is better higher, -1 if lower, 0 if neither.
    """

    label: str
    score: str
    of: str = "mean"
    times: float = 1.0
    digits: int = 2
    better: int = 1

    @property
    def deviation(self) -> str:
        """The name of the statistic's standard deviation over the same clients."""
        return "std" if self.of == "mean" else f"{self.of}_std"


MEASURES = {
    "accuracy_pct": Measure("accuracy, %", "accuracy", times=100),
    "mean_accuracy_pct": Measure("accuracy, %", "accuracy", times=100),
    "best5pct_accuracy_pct": Measure("best 5 %", "accuracy", "best5", 100),
    "worst5pct_accuracy_pct": Measure("worst 5 %", "accuracy", "worst5", 100),
    "MAE": Measure("MAE", "mae@12", better=-1),
    "MAPE_pct": Measure("MAPE, %", "mape@12", better=-1),
    "RMSE": Measure("RMSE", "rmse@12", better=-1),
    "mse_1e-3": Measure("MSE, 1e-3", "nmse", times=1000, digits=1, better=-1),
    "weight_self": Measure("weight for itself", "weight", "itself", digits=4, better=0),
    "weight_similar": Measure("weight for its group", "weight", "within", digits=4, better=0),
    "weight_other": Measure("weight for others", "weight", "between", digits=4, better=0),
    "asr_pct": Measure("success of the backdoor, %", "success", times=100, digits=1, better=-1),
    "rand_index_min": Measure("least Rand index", "rand", "least"),
}
SCORED = "by the table's protocol"  # beside the names of models
STAGES = {"prior": 1 / 6, "middle": 1 / 2, "final": 1.0}  # of the selected round (FedAGHN, Table 4); and the first


@dataclass(frozen=True)
class Cell:
    """One method on one column: an experiment, or why there is none."""

    row: Row
    column: Column
    experiment: Experiment | None  # with the first seed
    problem: str = ""


class Line(NamedTuple):
    """One number of the table, as printed and as reproduced."""

    column: Column
    row: Row
    metric: str
    paper: Number | None
    by_seed: dict[int, float]
    over_clients: float | None  # standard deviation, a mean over seeds
    flags: tuple[str, ...]
    status: str  # why there is no result, or fewer seeds than requested
    seconds: float | None = None  # of training, a mean over runs

    @property
    def mean(self) -> float | None:
        """Our mean over seeds."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        """Our standard deviation over seeds."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper.mean


@dataclass
class Measured:
    """What the runs of a cell have, by metric."""

    status: str  # why it is not complete, or empty
    values: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))  # by seed
    deviations: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # over clients, of each seed
    seconds: list[float] = field(default_factory=list)  # of each run
    flags: list[str] = field(default_factory=list)

    def add(self, metric: str, seed: int, scores: Mapping[str, float]) -> None:
        """Add the scores of a run."""
        measure = MEASURES[metric]
        self.values[metric][seed] = measure.times * scores[measure.of]
        if measure.deviation in scores:
            self.deviations[metric].append(measure.times * scores[measure.deviation])


@dataclass(frozen=True)
class Reproduction:
    """A published table to be rebuilt in a folder.

    `methods` and `columns` are the requested names, all if empty; a method that is not printed in the table, or one of
    your own, mine.py:Stay, adds a row. `model` is a network to be trained in place of the paper's.
    Raises UsageError for names that the table does not have, for named ones that cannot be run, and for methods that
    share no column.
    """

    protocol: Protocol
    out: Path
    data_dir: Path | None
    methods: Sequence[str] = ()
    columns: Sequence[str] = ()
    seeds: int | None = None  # None: as many as the protocol has
    scale: float = 1.0
    model: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UsageError(f"--scale must lie in (0, 1]; got {self.scale}")
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"--seeds counts runs, so it must be at least 1; got {self.seeds}")
        if self.model:
            parts.take(MODELS, self.model, "--model", given=2)
        added = {
            plugins.short_name(name): self._add_row(name) for name in self.methods if name not in self.protocol.rows
        }
        rows = {**self.protocol.rows, **{name: row for name, row in added.items() if row is not None}}
        rows |= {name: self.protocol.extra(name) for name in self._left_here() if name not in rows}
        object.__setattr__(self, "protocol", replace(self.protocol, rows=rows))
        object.__setattr__(self, "methods", [plugins.short_name(name) for name in self.methods])
        for what, requested, available in (
            ("method", self.methods, self.protocol.rows),
            ("column", self.columns, self.protocol.columns),
        ):
            for name in requested:
                if name not in available:
                    raise UsageError(f"{self.protocol.name} has no {what} '{name}'; {nearest(name, available)}")
        for cell in self.cells():
            for what, name, named, problem in (
                ("method", cell.row.name, self.methods, cell.row.missing),
                ("column", cell.column.name, self.columns, cell.column.missing or self.lacking(cell.column)),
            ):
                if name in named and problem:
                    raise UsageError(f"{self.protocol.name}: {what} '{name}': {problem}")
        self._check_beside()

    def _add_row(self, name: str) -> Row | None:
        """The row of a requested method that the table does not print; None if there is no such method."""
        if plugins.is_path(name):
            parts.take(METHODS, name, "--method")
            called, shared = plugins.short_name(name), self.protocol.scoring
            return Row(called, called, kind=UNPRINTED, scoring=shared, changes={"method": name})
        return self.protocol.extra(name) if name in METHODS or name in self.protocol.others else None

    def _left_here(self) -> list[str]:
        """Methods of kinfed that earlier commands added to the table in this folder."""
        inside = [path.name for name in self.protocol.columns for path in (self.out / "runs" / name).glob("*")]
        return [name for name in dict.fromkeys(inside) if name in METHODS]

    def _check_beside(self) -> None:
        """Raise UsageError if a requested method runs on no requested column, or if they share none."""
        columns = [self.protocol.columns[name] for name in self.columns or self.protocol.columns]
        able: dict[str, set[str]] = {}
        for name in self.methods:
            row = self.protocol.rows[name]
            lacking = [column.lacks[name] for column in columns if name in column.lacks]
            if len(lacking) == len(columns):
                raise UsageError(f"{self.protocol.name}: '{name}' runs on none of these columns: {lacking[0]}")
            cells = [self.cell(row, column) for column in columns]
            able[name] = {cell.column.name for cell in cells if not cell.problem}
        if all(able.values()) and able and not set.intersection(*able.values()):
            where = "; ".join(f"{name} runs on {', '.join(sorted(names))}" for name, names in able.items())
            raise UsageError(f"{self.protocol.name}: these methods share no column, so none can be compared: {where}")

    @property
    def count(self) -> int:
        """How many seeds a cell has."""
        return self.seeds or self.protocol.seeds

    def cells(self) -> list[Cell]:
        """The requested cells, column by column."""
        columns, requested = self.protocol.columns, self.columns or self.protocol.columns
        parts = [part for name in requested for part in columns[name].mean_of]  # columns that a mean needs
        rows = [self.protocol.rows[name] for name in self.methods or self.protocol.rows]
        return [
            self.cell(row, columns[name])
            for name in dict.fromkeys([*requested, *parts])
            for row in rows
            if self.methods or row.kind != CONTROL or row.name not in columns[name].lacks
        ]

    def cell(self, row: Row, column: Column) -> Cell:
        """The experiment of a method on a column, or why there is none."""
        at = row.name, column.name
        if at not in self._cells_by_place:
            self._cells_by_place[at] = self._make(row, column)
        return self._cells_by_place[at]

    @cached_property
    def _cells_by_place(self) -> dict[tuple[str, str], Cell]:
        """The cells made so far, by row and column."""
        return {}

    def _make(self, row: Row, column: Column) -> Cell:
        problem = row.missing or column.missing or column.lacks.get(row.name) or self.lacking(column)
        if problem or column.mean_of:
            return Cell(row, column, None, problem)
        raw = self.protocol.raw(row, column) | ({"model": self.model} if self.model else {})
        return Cell(
            row, column, config.resolve(published_table.scale_config(raw, self.scale) if self.scale < 1 else raw)
        )

    def folder(self, row: Row, column: Column) -> Path:
        """Where the runs of a cell are, one folder per seed; columns that read the same runs share them."""
        first = next(candidate for candidate in self.protocol.columns.values() if candidate.changes == column.changes)
        return self.out / "runs" / first.name / row.name

    def runs(self) -> list[Job]:
        """Every requested run. Of equal ones that are not begun, the first."""
        jobs = self._list_jobs()
        identities = [twins.identity(job.experiment.table) for job in jobs]
        is_first = [identities.index(identity) == i for i, identity in enumerate(identities)]
        return [job for job, first in zip(jobs, is_first, strict=True) if first or RunFolder(job.folder).is_begun]

    def _list_jobs(self) -> list[Job]:
        """Every requested run; columns that read the same runs share them."""
        result: dict[Path, Job] = {}
        for seed in range(self.count):
            for cell in self.cells():
                if cell.experiment is not None:
                    folder = follow_pointer(self.folder(cell.row, cell.column) / f"seed-{seed}")
                    if folder not in result:
                        experiment = config.resolve({**cell.experiment.table, "seed": seed})
                        result[folder] = Job(f"{cell.row.name} on {cell.column.name}, seed {seed}", experiment, folder)
        return list(result.values())

    def share(self, precision: str | None = None) -> None:
        """Let requested runs that are not begun read a finished run of the same experiment, here or in a folder beside.

        Of equal ones among them the first is run. `precision` is what they would be run in.
        """
        trained = twins.find_finished_runs(self.out, precision)
        for job in self._list_jobs():
            first = trained.setdefault(twins.identity(job.experiment.table), job.folder)
            if first != job.folder and not RunFolder(job.folder).is_begun:
                twins.point(job.folder, first)

    def lines(self, failed: Mapping[str, str] | None = None) -> list[Line]:
        """The table as far as it is known: the requested cells, and any others that are finished in the folder.

        `failed` gives the reason of each failed run, by its folder.
        """
        requested = [(cell.row.name, cell.column.name) for cell in self.cells()]
        finished = [
            (row, column)
            for column in self.protocol.columns
            for row in self.protocol.rows
            if self.finished_runs(self.cell(self.protocol.rows[row], self.protocol.columns[column]))
        ]
        shown = {*requested, *finished}
        result: list[Line] = []
        for column in self.protocol.columns.values():
            for row in self.protocol.rows.values():
                if (row.name, column.name) in shown:
                    result += self._lines(self.cell(row, column), failed or {})
        return result

    def lacking(self, column: Column) -> str:
        """Which data of a column is missing on this machine, and how to get it; empty if nothing is missing."""
        if column.mean_of:
            return next((why for name in column.mean_of if (why := self.lacking(self.protocol.columns[name]))), "")
        name = published_table.dataset_of(self.protocol, column)
        if name in WITHOUT_FILE or (self.data_dir is not None and (self.data_dir / f"{name}.npz").is_file()):
            return ""
        return f"needs {name}: " + (
            f"kinfed list datasets --fetch {name}" if name in ORIGINALS else f"{name}.npz is not here"
        )

    def finished_runs(self, cell: Cell) -> dict[int, RunFolder]:
        """The folders of a cell's finished runs, by seed; raises UsageError for one of another experiment."""
        if cell.experiment is None:
            return {}
        folders = {}
        for folder in twins.folders(self.folder(cell.row, cell.column)):
            seed, run_folder = folder.name.removeprefix("seed-"), follow_pointer(folder)
            if seed.isdecimal() and RunFolder(run_folder).is_finished:  # not a user's copy of a run
                check_same(config.resolve({**cell.experiment.table, "seed": int(seed)}), run_folder)
                folders[int(seed)] = RunFolder(run_folder)
        return dict(sorted(folders.items()))

    def clients(self, cell: Cell, score: str) -> dict[int, dict[str, Array]]:
        """By seed, a test score of each client at the selected round, of each named model: [N]; NaN where none counts.

        With `SCORED`, that of the row's protocol, where this is another than one kind of model at one round.
        Those that count are the clients that the table scores: under an attack the honest, of novel clients these.
        """
        return {
            seed: {
                **{model: _by_client(folder, cell, score, model) for model in folder.read_summary().scores},
                **self._by_protocol(folder, cell, score),
            }
            for seed, folder in self.finished_runs(cell).items()
        }

    def _by_protocol(self, folder: RunFolder, cell: Cell, score: str) -> dict[str, Array]:
        """What `clients` adds: nothing, or the scores by the row's protocol."""
        rule = cell.row.scoring
        return {} if rule.is_simple else {SCORED: _mask_uncounted(folder, cell, rule.read(folder, score))}

    def seconds(self) -> float:
        """How long the finished runs of this table have trained, each counted once."""
        folders: dict[str, RunFolder] = {}
        for column in self.protocol.columns.values():
            for row in self.protocol.rows.values():
                folders |= {str(folder): folder for folder in self.finished_runs(self.cell(row, column)).values()}
        return sum(folder.read_summary().cost.seconds for folder in folders.values())

    def _lines(self, cell: Cell, failed: Mapping[str, str]) -> list[Line]:
        column, row = cell.column, cell.row
        if column.mean_of:
            measured = self._mean_of_columns(cell, failed)
        elif cell.problem:
            measured = Measured(cell.problem)
        else:
            measured = self._read_runs(cell, failed)
        flags = self._flags_before_runs(cell) + measured.flags
        if self.scale < 1 and any(measured.values.values()):
            flags.append(f"scaled {self.scale:g}")
        return [
            Line(
                column,
                row,
                metric,
                paper=self.protocol.numbers.get((column.dataset, column.setting, row.printed, metric)),
                by_seed=measured.values[metric],
                over_clients=fmean(measured.deviations[metric]) if measured.deviations[metric] else None,
                flags=tuple(dict.fromkeys(flags)),
                status=measured.status,
                seconds=fmean(measured.seconds) if measured.seconds else None,
            )
            for metric in self.protocol.metrics(column)
        ]

    def _mean_of_columns(self, cell: Cell, failed: Mapping[str, str]) -> Measured:
        """The means of a row over the columns that this one is a mean of, by seeds that all of them have."""
        columns = [self.protocol.columns[name] for name in cell.column.mean_of]
        parts = [self._lines(self.cell(cell.row, column), failed) for column in columns]
        missing = next((line.status for lines in parts for line in lines if line.status), "")
        measured = Measured(cell.problem or missing)
        for metric, *lines in zip(self.protocol.metrics(cell.column), *parts, strict=True):
            measured.flags += [flag for line in lines for flag in line.flags]
            shared = set.intersection(*(set(line.by_seed) for line in lines))
            seeds = [seed for seed in lines[0].by_seed if seed in shared]
            measured.values[metric] = {seed: fmean(line.by_seed[seed] for line in lines) for seed in seeds}
        return measured

    def _read_runs(self, cell: Cell, failed: Mapping[str, str]) -> Measured:
        """What the finished runs of a cell have, seed by seed."""
        place = self.folder(cell.row, cell.column)
        folders = self.finished_runs(cell)
        broken = [why for folder, why in failed.items() if Path(folder).parent == place]
        measured = Measured("")
        for seed, folder in folders.items():
            with note_failure(broken, f"seed {seed} cannot be read"):
                summary = folder.read_summary()
                for metric, scores in _read_scores(folder, cell, self.protocol.metrics(cell.column)).items():
                    measured.add(metric, seed, scores)
                measured.seconds.append(summary.cost.seconds)
                measured.flags += _flags(cell, summary)
                measured.flags += twins.flag_shared_run(place / f"seed-{seed}", folder.path)
        if broken:
            measured.status = f"failed: {broken[0]}"
        elif len(folders) < self.count:
            measured.status = f"{len(folders)} of {self.count} seeds" if folders else "not run"
        return measured

    def _flags_before_runs(self, cell: Cell) -> list[str]:
        """The flags that a cell has before anything is run."""
        column = cell.column
        marks = {
            "own model": self.model,
            "generated": column.generated,
            "stand-in": column.stand_in,
            "subset": column.subset,
        }
        kind = [cell.row.kind] if cell.row.kind in (CONTROL, UNPRINTED) else []
        if cell.row.scoring.reads_test:
            kind.append(BY_TEST)
        return kind + [flag for flag, applies in marks.items() if applies]


def _flags(cell: Cell, summary: Summary) -> list[str]:
    """What must be said of a finished run."""
    assert cell.experiment is not None
    graph = cell.experiment.table["federation"]["graph"]["name"]
    knows_labels = graph in ORACLES and cell.experiment.method_name in ON_GRAPHS
    marks = {
        "leaking": bool(summary.selection.caution),
        str(summary.cost.precision): summary.cost.precision in FLAGS,
        "oracle graph": knows_labels,
    }
    return [flag for flag, applies in marks.items() if applies]


def _read_scores(folder: RunFolder, cell: Cell, metrics: Sequence[str]) -> dict[str, dict[str, float]]:
    """What a finished run has of each metric, all of them or none: the statistics of its score, as `_scores`."""
    return {metric: _scores(folder, cell, MEASURES[metric].score) for metric in metrics}


def _scores(folder: RunFolder, cell: Cell, score: str) -> dict[str, float]:
    """A finished run's statistics of a score, by their names, which a measure's `of` refers to."""
    assert cell.experiment is not None
    summary = folder.read_summary()
    model = cell.row.score or summary.selection.chosen
    if model not in summary.scores:
        raise UsageError(f"{folder} has no model '{model}'; it has {', '.join(summary.scores)}")
    at = int(summary.scores[model]["round"])
    if score == "weight":
        return _weights(folder, cell.column, at, _groups(summary, cell.experiment))
    if score == "rand":
        index = rand_by_round(folder.read_clusters(), _groups(summary, cell.experiment))[:, 0]  # [T]
        return {"least": float(index.min())}
    if summary.attack is not None:
        honest = summary.honest_scores[model]
        return {"mean": honest["success"]} if score == "success" else dict(honest)
    scores = _mask_uncounted(folder, cell, cell.row.scoring.read(folder, score))
    return spread(torch.from_numpy(scores), summary.metric.higher_is_better)


def _by_client(folder: RunFolder, cell: Cell, score: str, model: str) -> Array:
    """[N] a model's test score of each client at its selected round; NaN of clients that the table does not score."""
    return _mask_uncounted(folder, cell, Scoring((model,)).read(folder, score))


def _mask_uncounted(folder: RunFolder, cell: Cell, scores: Array) -> Array:
    """[N] scores with NaN for clients that the table does not score."""
    assert cell.experiment is not None
    if cell.column.novel:
        summary = folder.read_summary()
        late = latecomers(summary.seeds[0], tags(summary.clients.names), cell.experiment.participation.late)
        others = np.setdiff1d(np.arange(len(scores)), late)
        scores[others] = np.nan
    return scores


def _weights(folder: RunFolder, column: Column, selected: int, groups: Tensor) -> dict[str, float]:
    """Mean weights of the relation in the column's layers at its stage."""
    relations = folder.read_relations()
    stage, layers = column.at["stage"], column.at["layers"]
    target = relations.rounds[0] if stage == "first" else max(1, round(STAGES[stage] * selected))
    weights = torch.from_numpy(relations.weights[abs(relations.rounds - target).argmin()])  # [N, N] or [L, N, N]
    if weights.ndim == 3:
        half = len(weights) // 2
        weights = {"all": weights, "shallow": weights[:half], "deep": weights[half:]}[layers]
    return group_weights(weights, groups)._asdict()


def _groups(summary: Summary, experiment: Experiment) -> Tensor:
    """[N] the hidden groups, which partitions form from the clients in order."""
    partition = experiment.table["federation"]["partition"]
    count = partition["nodes"] if "nodes" in partition else partition["groups"]
    return hidden_groups(partition["name"], count, summary.data.clients)
