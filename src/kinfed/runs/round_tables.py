"""The tables of a run by round: its scores, in memory as in history.csv, what it took, and its diagnostics."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.history import History, Spent
from ..files import readable, replacing

if TYPE_CHECKING:
    from polars import DataFrame

TEXTS = ("client", "model", "split", "metric")


def make_rows(history: History) -> "DataFrame":
    """The rows of a history: round (from 1), client, model, split, metric and value, which is NaN without a score."""
    import polars

    keys = [(round + 1, *key) for round, scores in zip(history.rounds, history.scores, strict=True) for key in scores]
    values = torch.cat([values.double() for scores in history.scores for values in scores.values()])
    rows = polars.DataFrame(keys, ["round", *TEXTS[1:]], orient="row").join(
        polars.DataFrame({"client": history.names}), how="cross", maintain_order="left_right"
    )
    return rows.select("round", *TEXTS, value=polars.Series(values.numpy()))


def read_rows(path: Path) -> "DataFrame":
    """The same rows of a run's history.csv; raises OSError for a file that is not there, ValueError for half of one."""
    import polars

    schema = {"round": polars.Int64, **dict.fromkeys(TEXTS, polars.String), "value": polars.Float64}
    try:
        with path.open("rb") as file:
            rows = polars.read_csv(file, columns=[*schema], schema_overrides=schema, empty_string_is_null=False)
    except polars.exceptions.PolarsError as problem:
        raise ValueError(str(problem)) from None
    if rows["value"].null_count():
        raise ValueError("it ends within a line")
    return rows


def add_seed(rows: "DataFrame", seed: int) -> "DataFrame":
    """Rows with a column for the seed of their run, before the others."""
    import polars

    return rows.select(polars.lit(seed, polars.Int64).alias("seed"), *rows.columns)


def write_scores(history: History, path: Path, caution: str) -> None:
    """Write all scores, one a line: round (from 1), client, model, split, metric, value; and the `caution`, if any."""
    more = {"caution": caution} if caution else {}
    _write(
        path,
        ["round", *TEXTS, "value", *more],
        (
            [round + 1, name, *key, f"{value:.7g}", *more.values()]
            for round, scores in zip(history.rounds, history.scores, strict=True)
            for key, values in scores.items()
            for name, value in zip(history.names, values.tolist(), strict=True)
        ),
    )


def write_cost(history: History, path: Path) -> None:
    """Write one line for each evaluated round (from 1): what the run had taken by then, see `Spent`."""
    seconds = ["" if spent.seconds is None else f"{spent.seconds:.3f}" for spent in history.cost.spent]
    lines = ([s.round + 1, *s[1:-1], took] for s, took in zip(history.cost.spent, seconds, strict=True))
    _write(path, Spent._fields, lines)


def read_cost(path: Path) -> dict[int, Spent]:
    """What `write_cost` has written, by round (from 1); nothing if that was not written."""
    spent: dict[int, Spent] = {}
    if not path.exists():
        return spent
    with readable(path, f"delete the folder {path.parent} and run again"), path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            took = float(row["seconds"]) if row["seconds"] else None
            spent[int(row["round"])] = Spent._make([*(int(row[key]) for key in Spent._fields[:-1]), took])
    return spent


def write_diagnostics(history: History, path: Path) -> None:
    """Write one line a number: round (from 1), client (empty for one of all clients), note, value; NaN is left out."""
    _write(
        path,
        ["round", "client", "note", "value"],
        (
            [round + 1, name, note, f"{value:.7g}"]
            for round, diagnostics in zip(history.rounds, history.diagnostics, strict=True)
            for note, values in diagnostics.items()
            for name, value in zip(history.names if values.ndim else ("",), values.view(-1).tolist(), strict=True)
            if not math.isnan(value)
        ),
    )


def read_notes(path: Path, note: str) -> list[dict[str, float]]:
    """The values of one note in each evaluated round that has any, by client."""
    rounds: dict[str, dict[str, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["note"] == note:
                rounds.setdefault(line["round"], {})[line["client"]] = float(line["value"])
    return list(rounds.values())


def write_confusion(path: Path, counts: Tensor, clients: Sequence[str], classes: Sequence[str]) -> None:
    """Write how many test examples of each class are taken for each, [N, C, C] as of `Run.confusion`."""
    cells = zip(counts.indices().T.tolist(), counts.values().tolist(), strict=True)
    lines = ([clients[i], classes[truth], classes[taken], examples] for (i, truth, taken), examples in cells)
    _write(path, ["client", "truth", "predicted", "examples"], lines, "\n")


def read_confusion(path: Path) -> list[tuple[str, str, str, int]]:
    """Client, class, predicted class and number of test examples."""
    with readable(path), path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
        return [(client, truth, predicted, int(examples)) for client, truth, predicted, examples in lines]


def _write(path: Path, head: Iterable[str], lines: Iterable[list[Any]], end: str = "\r\n") -> None:
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator=end)
        table.writerow(head)
        table.writerows(lines)
