"""The statistics of a published table's runs, column by column and over columns, and how they agree with print."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kinfed.core.summary import ClientScores, Summary
from kinfed.errors import note_failure
from kinfed.report.tables.compare import Comparison, verdicts
from kinfed.report.tables.run_rows import Array, Row, make_row, replace_federation
from kinfed.runs.run import Run
from kinfed.runs.run_folder import RunFolder
from kinfed.verdict.statistics import is_share, kendall

from .published_table import Column
from .reproduction import MEASURES, SCORED, Line, Measure, Reproduction

NO_CLIENTS = ("weight", "success", "rand")  # scores that single clients do not have


def comparison(made: Reproduction) -> Comparison:
    """The finished runs of a table as sets of comparable runs, one for each column: its first metric, best run first.

    Scored is the model that the table scores. Columns that are means of others, or read the same runs, or whose numbers
    are no scores of clients have none.
    """
    sets, seen, lost = list[tuple[Row, ...]](), list[object](), list[str]()
    for column in made.protocol.columns.values():
        measure = _first(made, column)
        if measure is None or column.mean_of or column.changes in seen:
            continue
        seen.append(column.changes)
        rows = list[tuple[Row, bool]]()
        for name in made.protocol.rows:
            with note_failure(lost, f"{name} on {column.name} has no statistics"):
                rows += _row(made, name, column, measure)
        if rows:
            sets.append(tuple(sorted(_add_counts(rows), key=lambda row: -row.rank())))
    return Comparison(tuple(sets), tuple(lost), named=tuple(made.protocol.compares.items()))


def _add_counts(rows: Sequence[tuple[Row, bool]]) -> Iterator[Row]:
    """The rows, with the clients that gain and lose over Local beyond noise, where `_row` says that it can be told."""
    judged, _ = verdicts([row for row, has_examples in rows if has_examples])
    counted = {row.method: row for row in judged if row.counts is not None and row.counts.paired}
    return (counted.get(row.method, row) for row, _ in rows)


def _is_own(summary: Summary, model: str, ours: Array) -> bool:
    """Whether a run's own score, and the model that validation prefers, are these."""
    scored = np.array(summary.clients.scores[summary.selection.chosen])
    return summary.selection.chosen == model and len(scored) == len(ours) and np.allclose(scored, ours, equal_nan=True)


def _first(made: Reproduction, column: Column) -> Measure | None:
    """The first metric of a column that is a mean over clients of their scores."""
    measures = [MEASURES[metric] for metric in made.protocol.metrics(column)]
    fit = [
        measure for measure in measures if measure.better and measure.of == "mean" and measure.score not in NO_CLIENTS
    ]
    return fit[0] if fit else None


def _row(made: Reproduction, name: str, column: Column, measure: Measure) -> list[tuple[Row, bool]]:
    """The row of a method on a column; none if no seed of it is finished.

    With it, whether its runs keep the scores of single test examples for what is scored here: they do in their own
    metric, and for the model that validation prefers.
    """
    cell = made.cell(made.protocol.rows[name], column)
    folders = made.finished_runs(cell)
    if not folders:
        return []
    assert cell.experiment is not None
    runs = list(map(Run, folders.values()))
    replace_federation(runs, cell.experiment.table["federation"])  # in which all are alike, however old a summary is
    row = make_row(RunFolder(made.folder(cell.row, column)), runs, cell.row.score)
    if not cell.row.scoring.is_simple:
        row = replace(row, model=SCORED)
    share = is_share(measure.score)
    scored = {
        seed: {model: values * (1 if share else measure.times) for model, values in models.items()}
        for seed, models in made.clients(cell, measure.score).items()
    }
    shown = [scores[row.model] for scores in scored.values()]
    all_own = all([_is_own(row.by_seed[seed].summary, row.model, scores[row.model]) for seed, scores in scored.items()])
    for seed, scores in scored.items():  # in the place of those that the run was written with
        run = row.by_seed[seed]
        of_clients = ClientScores(names=run.names, scores={model: values.tolist() for model, values in scores.items()})
        run.summary = replace(run.summary, by_client=of_clients)
    return [(_describe_row(row, name, column, measure, shown), all_own)]


def _describe_row(row: Row, name: str, column: Column, measure: Measure, scores: Sequence[Array]) -> Row:
    """The row as that of a method on a column, whose clients have these scores in the measure: [N] for each seed."""
    label = measure.score if is_share(measure.score) else measure.label
    metric = replace(row.metric, name=label, higher_is_better=measure.better > 0)
    federation = {key: value for key, value in row.summary.data.federation.items() if key != "graph"}
    data = replace(
        row.summary.data,
        dataset=f"{column.dataset}, {column.setting} ({column.name})",  # the table's name tells graphs apart
        federation=federation,
        clients=max(int(np.isfinite(values).sum()) for values in scores),
    )
    mean = float(np.mean([np.nanmean(values) for values in scores]))
    summary = replace(row.summary, method=name, metric=metric, data=data)
    return replace(row, summary=summary, ranked_by=metric.name, scores={**row.scores, "mean": mean})


def agreement(group: Sequence[Line]) -> str:
    """Kendall's tau-b between our means and the printed ones, of one metric of a column; empty with fewer than three.

    Of rows that are printed alike, such as variants of a method, the first counts.
    """
    both: dict[str, tuple[float, float]] = {}
    for line in group:
        if line.mean is not None and line.paper is not None:
            both.setdefault(line.row.printed, (line.mean, line.paper.mean))
    if len(both) < 3:
        return ""
    tau = kendall(*zip(*both.values(), strict=True))
    text = "not defined, as all are level" if np.isnan(tau) else f"{tau:+.2f}"
    return f"Kendall's tau to the paper's order {text} ({len(both)} methods)"
